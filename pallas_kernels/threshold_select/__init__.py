"""From scores to a Selection: see `api.threshold_select`."""

from jsparse.deprecated import moved_names
from jsparse.pallas_kernels.threshold_select.api import (
    Budget,
    Threshold,
    TopK,
    TopP,
    threshold_select,
)

__all__ = ["Budget", "Threshold", "TopK", "TopP", "threshold_select"]
__getattr__ = moved_names(__name__, select=f"{__name__}:threshold_select")
