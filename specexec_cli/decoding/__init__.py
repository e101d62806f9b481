"""Decoding methods: SpecExec and the autoregressive oracle."""
