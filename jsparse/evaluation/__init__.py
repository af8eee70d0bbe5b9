"""Measures the loss of quality that a policy causes.

It compares closeness to dense attention, tasks of long context, and attention on real queries.
"""
