"""Runs models layer by layer: transformers' modules, fed with streamed weights, over our caches."""
