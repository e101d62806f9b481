"""Decoding loops: SpecExec for one text and for several, plain decoding."""
