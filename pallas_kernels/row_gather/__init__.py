"""Gathers listed rows of a pool into one compact array: see `api.row_gather`."""

from jsparse.pallas_kernels.row_gather.api import row_gather

__all__ = ["row_gather"]
