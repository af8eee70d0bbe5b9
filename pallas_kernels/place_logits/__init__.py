"""A head's logits from the order of its list to the order of its pages: see `api.place_logits`."""

from jsparse.pallas_kernels.place_logits.api import place_logits

__all__ = ["place_logits"]
