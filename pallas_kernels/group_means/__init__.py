"""Averages the points of each group: see `api.group_means`."""

from jsparse.pallas_kernels.group_means.api import group_means

__all__ = ["group_means"]
