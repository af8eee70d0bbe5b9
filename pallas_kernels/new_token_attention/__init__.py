"""Attends causally among a few new tokens: see `api.new_token_attention`."""

from jsparse.pallas_kernels.new_token_attention.api import new_token_attention

__all__ = ["new_token_attention"]
