"""Simulations: the real DSI orchestrator with fake models under a virtual clock."""
