"""Knows the machine: free memory, the folders of jsparse's own files, which extras are there.

Everything may use it; it uses nothing else of jsparse. `memory` and `processes` alone import jax,
when asked.
"""
