"""Updates the key bounds of touched pages: see `api.bounds_append`."""

from jsparse.pallas_kernels.bounds_append.api import bounds_append

__all__ = ["bounds_append"]
