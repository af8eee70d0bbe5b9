"""Multiplies one row by a matrix: see `api.skinny_product`."""

from jsparse.pallas_kernels.skinny_product.api import skinny_product

__all__ = ["skinny_product"]
