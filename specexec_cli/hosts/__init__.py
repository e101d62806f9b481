"""Several machines for one model: workers that open spans of its layers, and the way to them."""
