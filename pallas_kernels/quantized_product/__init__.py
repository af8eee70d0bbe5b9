"""Multiplies by a matrix in blocks: see `api.quantized_product`."""

from jsparse.pallas_kernels.quantized_product.api import quantized_product

__all__ = ["quantized_product"]
