"""Residual add, normalisation and product in one op: see `api.norm_product`."""

from jsparse.pallas_kernels.norm_product.api import norm_product

__all__ = ["norm_product"]
