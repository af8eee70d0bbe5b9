"""Rewrites the tokens that each KV head keeps into contiguous pages: see `api.compact_pages`."""

from jsparse.pallas_kernels.compact_pages.api import compact_pages

__all__ = ["compact_pages"]
