"""Turns model names into files, and says what is known of architectures and formats by name."""
