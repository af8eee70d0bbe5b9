"""Rotates new tokens' q and k and appends K and V: see `api.rope_append`."""

from jsparse.pallas_kernels.rope_append.api import rope_append

__all__ = ["rope_append"]
