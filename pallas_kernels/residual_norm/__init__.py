"""Adds to the residual stream and normalises it: see `api.residual_norm`."""

from jsparse.pallas_kernels.residual_norm.api import residual_norm

__all__ = ["residual_norm"]
