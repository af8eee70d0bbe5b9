"""Scores queries against a 4-bit copy of K: see `api.int4_scores`."""

from jsparse.pallas_kernels.int4_scores.api import int4_scores

__all__ = ["int4_scores"]
