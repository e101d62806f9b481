"""What distributed speculation would do on given hardware: the real orchestrator, fake models."""
