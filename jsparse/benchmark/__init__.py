"""Benchmarks of the engine: throughput and latency as users see them."""
