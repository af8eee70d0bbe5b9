"""Scores cluster centroids by a step's queries: see `api.centroid_scores`."""

from jsparse.pallas_kernels.centroid_scores.api import centroid_scores

__all__ = ["centroid_scores"]
