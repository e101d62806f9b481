"""Engines: many texts asked for at once, from any thread, over one session."""
