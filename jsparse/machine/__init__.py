"""Queries the machine: free memory, folders of jsparse's own files, installed extras.

Any module may use it; it imports nothing else of jsparse. Only `jax_settings`, `memory` and
`processes` import jax.
"""
