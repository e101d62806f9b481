"""Turns model names into files: reads models.toml, and downloads from the hub."""
