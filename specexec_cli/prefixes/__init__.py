"""Prefixes of texts kept on disk: a model's rows of them, which later sessions need not compute."""
