"""Benchmarks: one question a script, run as `python -m bench.<name>`."""
