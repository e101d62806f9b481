"""GGUF files: what is in their headers, and what transformers calls it. Torch-free, bytes only."""
