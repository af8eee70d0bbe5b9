"""Multiplies silu(gate) · up by a matrix: see `api.gated_product`."""

from jsparse.pallas_kernels.gated_product.api import gated_product

__all__ = ["gated_product"]
