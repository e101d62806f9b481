"""Command line: options, one file per command, rendering."""
