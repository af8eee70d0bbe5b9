"""Writes rows into a pool in place: see `api.row_scatter`."""

from jsparse.pallas_kernels.row_scatter.api import row_scatter

__all__ = ["row_scatter"]
