"""A conversation over a session: turns, commands and transcript, without any terminal code."""
