"""Turns scores into a Selection: see `api.threshold_select`."""

from typing import Any

from jsparse import deprecated
from jsparse.pallas_kernels.threshold_select.api import threshold_select
from jsparse.pallas_kernels.threshold_select.rules import Threshold, TopK, TopP

__all__ = ["Threshold", "TopK", "TopP", "threshold_select"]


def __getattr__(name: str) -> Any:
    if name == "select":
        deprecated.warn("the op select", "threshold_select")
        return threshold_select
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
