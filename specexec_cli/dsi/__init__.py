"""Distributed speculative inference (DSI): drafters and target servers that work at the same time.

Source: Timor et al., "Distributed Speculative Inference", arXiv:2405.14105.
"""
