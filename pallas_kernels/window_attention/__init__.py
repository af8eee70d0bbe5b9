"""Measures what the newest queries attend to: see `api.window_attention`."""

from jsparse.pallas_kernels.window_attention.api import window_attention

__all__ = ["window_attention"]
