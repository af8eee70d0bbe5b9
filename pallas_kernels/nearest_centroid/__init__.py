"""Finds each point's nearest centroid: see `api.nearest_centroid`."""

from jsparse.pallas_kernels.nearest_centroid.api import nearest_centroid

__all__ = ["nearest_centroid"]
