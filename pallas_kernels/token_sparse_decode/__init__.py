"""Computes decode attention over single tokens: see `api.token_sparse_decode`."""

from jsparse.pallas_kernels.token_sparse_decode.api import token_sparse_decode

__all__ = ["token_sparse_decode"]
