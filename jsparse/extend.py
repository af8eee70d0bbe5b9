"""Exports the parts of a new policy: the contract, the cache, selections and `threshold_select`.

docs/own_policy.md shows how to write one; `jsparse generate --policy my_policy.py:my_policy` runs
it.
"""

from jsparse.builder import builder, require_policy, require_stays
from jsparse.cache import (
    CacheSpec,
    KVCache,
    LayerCache,
    StepView,
    cut_pages,
    read_heads,
    read_pages,
    read_slots,
    replace_layer,
    taking_part,
    truncate,
)
from jsparse.hooks import (
    AfterPromptFn,
    AppendFn,
    CheckFn,
    DenseBelowFn,
    InitFn,
    MaintainFn,
    MaxLengthFn,
    PrefillFn,
    PrefillView,
    SelectFn,
    State,
    StatsFn,
    UpdateFn,
    VerifiedFn,
)
from jsparse.hyper_parameters import below_one, flag, fraction, number_in, one_of, whole_number
from jsparse.pallas_kernels.compact_pages import compact_pages
from jsparse.pallas_kernels.threshold_select import Budget, Threshold, TopK, TopP, threshold_select
from jsparse.policies.combinators import WrappedState, with_state
from jsparse.policies.page_policy import page_policy
from jsparse.policies.sidecars import Sidecar, sidecar
from jsparse.policy import Eviction, Policy, Services, Shares, StandIn, at_layer, knob, without_knob
from jsparse.ranks import across, gathered, own_part
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
from jsparse.selection.partials import ListedLogits, Stats, StatsKind, Summary, merge

__all__ = [
    "AfterPromptFn",
    "AppendFn",
    "Budget",
    "CacheSpec",
    "CheckFn",
    "DenseBelowFn",
    "Eviction",
    "Granularity",
    "InitFn",
    "KVCache",
    "LayerCache",
    "ListedLogits",
    "MaintainFn",
    "MaxLengthFn",
    "Policy",
    "PrefillFn",
    "PrefillView",
    "SelectFn",
    "Selection",
    "Services",
    "Shares",
    "Sidecar",
    "StandIn",
    "State",
    "Stats",
    "StatsFn",
    "StatsKind",
    "StepView",
    "Summary",
    "Threshold",
    "TopK",
    "TopP",
    "UpdateFn",
    "VerifiedFn",
    "WrappedState",
    "across",
    "at_layer",
    "below_one",
    "builder",
    "compact_pages",
    "cut_pages",
    "everything",
    "flag",
    "fraction",
    "from_page_mask",
    "from_token_mask",
    "gathered",
    "knob",
    "merge",
    "nothing",
    "number_in",
    "one_of",
    "own_part",
    "page_policy",
    "paged",
    "read_heads",
    "read_pages",
    "read_slots",
    "replace_layer",
    "require_policy",
    "require_stays",
    "sidecar",
    "taking_part",
    "threshold_select",
    "truncate",
    "union",
    "whole_number",
    "window",
    "with_state",
    "without_knob",
]
