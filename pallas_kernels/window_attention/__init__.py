"""Measures what the newest queries attend to: see `api.window_attention`."""

from jsparse.pallas_kernels.window_attention.api import Over, window_attention

__all__ = ["Over", "window_attention"]
