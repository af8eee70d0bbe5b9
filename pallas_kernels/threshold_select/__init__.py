"""Turns scores into a Selection by a threshold: see `api.threshold_select`."""

from jsparse.pallas_kernels.threshold_select.api import threshold_select
from jsparse.pallas_kernels.threshold_select.rules import Always, Budget, Threshold, TopK, TopP

__all__ = ["Always", "Budget", "Threshold", "TopK", "TopP", "threshold_select"]
