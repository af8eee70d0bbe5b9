"""Decode attention over selected pages: see `api.block_sparse_decode`."""

from jsparse.pallas_kernels.block_sparse_decode.api import block_sparse_decode

__all__ = ["block_sparse_decode"]
