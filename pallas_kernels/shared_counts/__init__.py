"""Counts a row's best scores in each of its lists: see `api.shared_counts`."""

from jsparse.pallas_kernels.shared_counts.api import shared_counts

__all__ = ["shared_counts"]
