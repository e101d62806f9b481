"""What scripts/conformance found: written by it, not by hand."""

# model_type -> name for people
RUNS: dict[str, str] = {}
# model_type -> why not
REFUSED: dict[str, str] = {}
