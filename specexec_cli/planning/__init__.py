"""What is decided before a weight is loaded: which models, which tree, where each layer lives."""
