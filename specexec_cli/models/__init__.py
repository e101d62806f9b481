"""Models whose decoder layers come one after another: transformers' modules over our caches."""
