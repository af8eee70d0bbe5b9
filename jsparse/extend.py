"""Exports what a new policy needs: the contract, the cache, selections and `threshold_select`.

docs/own_policy.md shows how to write one; `jsparse generate --policy my_policy.py:my_policy` runs
it.
"""

from jsparse.cache import (
    CacheSpec,
    KVCache,
    LayerCache,
    read_heads,
    read_pages,
    read_slots,
    replace_layer,
    truncate,
)
from jsparse.pallas_kernels.compact_pages import compact_pages
from jsparse.pallas_kernels.threshold_select import Threshold, TopK, TopP, threshold_select
from jsparse.partials import ListedLogits, Stats, StatsKind, merge
from jsparse.policies.sidecars import Sidecar, sidecar
from jsparse.policy import (
    AppendFn,
    FallbackFn,
    InitFn,
    MaintainFn,
    Policy,
    PrefillFn,
    PrefillView,
    SelectFn,
    State,
    StatsFn,
    UpdateFn,
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
    "AppendFn",
    "CacheSpec",
    "FallbackFn",
    "Granularity",
    "InitFn",
    "KVCache",
    "LayerCache",
    "ListedLogits",
    "MaintainFn",
    "Policy",
    "PrefillFn",
    "PrefillView",
    "SelectFn",
    "Selection",
    "Sidecar",
    "State",
    "Stats",
    "StatsFn",
    "StatsKind",
    "Threshold",
    "TopK",
    "TopP",
    "UpdateFn",
    "below_one",
    "builder",
    "compact_pages",
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
    "replace_layer",
    "require_policy",
    "sidecar",
    "threshold_select",
    "truncate",
    "union",
    "whole_number",
    "window",
]
