"""Draft trees: where they come from, how they are searched, how large they should be."""
