"""Measures what a policy costs in quality.

It compares closeness to dense attention, tasks of long context, and attention on real queries.
"""
