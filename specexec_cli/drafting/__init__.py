"""Growing draft trees: best-first search and the resident draft model."""
