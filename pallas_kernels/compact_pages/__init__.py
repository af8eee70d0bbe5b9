"""Compacts each KV head's kept tokens into contiguous pages: see `api.compact_pages`."""

from jsparse.pallas_kernels.compact_pages.api import compact_pages

__all__ = ["compact_pages"]
