"""Exports what a new policy needs: the contract, the cache, selections and `threshold_select`.

docs/own_policy.md shows how to write one; `jsparse generate --policy my_policy.py:my_policy` runs
it.
"""

from jsparse.cache import CacheSpec, KVCache, LayerCache, read_heads, read_pages, read_slots
from jsparse.pallas_kernels.threshold_select import Threshold, TopK, TopP, threshold_select
from jsparse.partials import Stats, StatsKind, merge
from jsparse.policies.sidecars import Sidecar, sidecar
from jsparse.policy import (
    Policy,
    PrefillView,
    State,
    below_one,
    builder,
    fraction,
    require_policy,
    whole_number,
)
from jsparse.selection import (
    Granularity,
    Selection,
    everything,
    from_page_mask,
    from_token_mask,
    nothing,
    paged,
    union,
    window,
)

__all__ = [
    "CacheSpec",
    "Granularity",
    "KVCache",
    "LayerCache",
    "Policy",
    "PrefillView",
    "Selection",
    "Sidecar",
    "State",
    "Stats",
    "StatsKind",
    "Threshold",
    "TopK",
    "TopP",
    "below_one",
    "builder",
    "everything",
    "fraction",
    "from_page_mask",
    "from_token_mask",
    "merge",
    "nothing",
    "paged",
    "read_heads",
    "read_pages",
    "read_slots",
    "require_policy",
    "sidecar",
    "threshold_select",
    "union",
    "whole_number",
    "window",
]
