"""Measures the quality loss of a policy.

Measures are closeness to dense attention, long-context tasks, and attention on real queries.
"""
