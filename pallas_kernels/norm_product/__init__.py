"""Adds to the residual stream, normalises the sum and multiplies it: see `api.norm_product`."""

from jsparse.pallas_kernels.norm_product.api import norm_product

__all__ = ["norm_product"]
