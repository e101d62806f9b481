"""Benchmarks: datasets, interleaved runs, metrics, reports and the figures of the papers."""
