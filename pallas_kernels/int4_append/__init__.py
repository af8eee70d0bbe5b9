"""Appends new tokens to a 4-bit copy of K: see `api.int4_append`."""

from jsparse.pallas_kernels.int4_append.api import int4_append

__all__ = ["int4_append"]
