"""From scores to a Selection: see `api.select`."""

from jsparse.pallas_kernels.select.api import select
from jsparse.pallas_kernels.select.rules import Threshold, TopK, TopP

__all__ = ["Threshold", "TopK", "TopP", "select"]
