"""Benchmarks, one question per script: `python -m bench list`, `python -m bench reproduce NAME`."""
