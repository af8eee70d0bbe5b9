"""Attends from a prompt chunk to all or chosen blocks of keys: see `api.block_sparse_prefill`."""

from jsparse.pallas_kernels.block_sparse_prefill.api import (
    BLOCK,
    block_sparse_prefill,
    not_mosaic,
)

__all__ = ["BLOCK", "block_sparse_prefill", "not_mosaic"]
