"""Merges the partial results of split attention: see `api.merge_splits`."""

from jsparse.pallas_kernels.merge_splits.api import merge_splits

__all__ = ["merge_splits"]
