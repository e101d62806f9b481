"""Formats of row-packed weights, one file each; `base` says what a format states."""
