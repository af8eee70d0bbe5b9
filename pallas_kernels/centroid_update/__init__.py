"""Moves centroids as new points join their groups: see `api.centroid_update`."""

from jsparse.pallas_kernels.centroid_update.api import centroid_update

__all__ = ["centroid_update"]
