"""Distributed speculative inference (DSI): plan, orchestrator, workers.

Source: Timor et al., "Distributed Speculative Inference", arXiv:2405.14105.
"""
