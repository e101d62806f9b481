"""GGUF files: what their headers say, in the names that transformers uses. Imports no torch."""
