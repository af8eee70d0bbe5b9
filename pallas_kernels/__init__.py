"""Holds the kernels, one folder per op.

In each, `api` validates and dispatches, and `reference` is the plain-jnp oracle.
"""
