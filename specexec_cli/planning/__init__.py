"""Decisions before a weight is loaded: which models, how large a tree, where layers live."""
