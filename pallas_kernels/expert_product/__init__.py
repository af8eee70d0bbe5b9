"""Multiplies rows by the matrices of their experts: see `api.expert_product`."""

from jsparse.pallas_kernels.expert_product.api import expert_product

__all__ = ["expert_product"]
