"""Moves logits from list order to page order: see `api.place_logits`."""

from jsparse.pallas_kernels.place_logits.api import place_logits

__all__ = ["place_logits"]
