"""Reads the headers of GGUF files and puts them in transformers' terms. Imports no torch."""
