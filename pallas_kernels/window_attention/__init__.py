"""Measures the attention of the newest queries: see `api.window_attention`."""

from jsparse.pallas_kernels.window_attention.api import NormaliseOver, window_attention

__all__ = ["NormaliseOver", "window_attention"]
