"""Puts logits from the order of a list into that of pages: see `api.place_logits`."""

from jsparse.pallas_kernels.place_logits.api import place_logits

__all__ = ["place_logits"]
