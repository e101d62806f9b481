"""Names to files: what models.toml says, and what is downloaded from the hub."""
