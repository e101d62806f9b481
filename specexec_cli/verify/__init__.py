"""Verifying draft trees: attention masks, one target pass, the acceptance walk."""
