"""Computes upper bounds of page scores: see `api.page_bounds`."""

from jsparse.pallas_kernels.page_bounds.api import page_bounds

__all__ = ["page_bounds"]
