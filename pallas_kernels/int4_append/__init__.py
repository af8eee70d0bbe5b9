"""4-bit copies of new keys: see `api.int4_append`."""

from jsparse.pallas_kernels.int4_append.api import int4_append

__all__ = ["int4_append"]
