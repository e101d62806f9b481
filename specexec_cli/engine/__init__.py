"""Engines: many texts, asked for at once from any thread, decoded together over one session."""
