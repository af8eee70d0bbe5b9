"""From scores to a Selection: see `api.threshold_select`."""

from jsparse.pallas_kernels.threshold_select.api import (
    Budget,
    Threshold,
    TopK,
    TopP,
    threshold_select,
)

__all__ = ["Budget", "Threshold", "TopK", "TopP", "threshold_select"]
