"""Multiplies by a weight matrix, with the kernel for its type and the number of rows."""

from jsparse.pallas_kernels.linear.api import Matrix, product

__all__ = ["Matrix", "product"]
