"""Bytes: where weights lie on disk, and how they move to where they are multiplied."""
