"""From scores to a Selection: see `api.threshold_select`."""

from jsparse.deprecated import moved_names
from jsparse.pallas_kernels.threshold_select.api import threshold_select
from jsparse.pallas_kernels.threshold_select.rules import Budget, Threshold, TopK, TopP

__all__ = ["Budget", "Threshold", "TopK", "TopP", "threshold_select"]
__getattr__ = moved_names(__name__, select=f"{__name__}:threshold_select")
