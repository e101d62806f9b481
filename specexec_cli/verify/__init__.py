"""Verifying draft trees: masks, one target pass, the acceptance walk."""
