"""Chooses a method by measurements on this device; dense attention if no other is faster.

A result of `jsparse recommend` for the model on this device comes first. Otherwise the choice is
Twilight above the bytes of K and V from which we measured it to be faster on this device, and dense
attention on all other devices, including CPUs. With `exact=True` the policy need not be close to
dense attention: the fastest draft policy is used, above a different size.
"""

import functools
import logging
from typing import NamedTuple

import jax

from jsparse.builder import builder, dense
from jsparse.cache import CacheSpec
from jsparse.policies import choices
from jsparse.policies.all_pages import all_pages
from jsparse.policies.break_evens import break_evens
from jsparse.policies.expressions import parse
from jsparse.policies.twilight import twilight
from jsparse.policies.verified import verified
from jsparse.policy import Policy, StandIn

# The fastest measured method with a KL divergence from dense attention of at most 0.005 on SmolLM2,
# at 4K and 8K tokens (docs/results/twilight.md).
CHOICE = twilight(all_pages(), p=0.95)
# The fastest measured draft policy for `exact=True` (docs/exact.md).
DRAFTING = verified(budget=512)

logger = logging.getLogger("jsparse.auto")


class AutoChoice(NamedTuple):
    """The policy chosen by `auto`, the reason, and whether it was measured."""

    policy: Policy
    reason: str
    measured: bool = True


@builder
def auto() -> StandIn:
    """Uses the fastest policy measured for this device and size that stays close to dense.

    This is the choice of `jsparse recommend` for the model on this device. Without one it is
    Twilight, above the sizes from which it was faster on the devices that we measured, or else
    `dense`. The choice is made when the cache's sizes are known, before prefill;
    `Generation.stats.policy` and `jsparse info --policy auto` show it. `auto` cannot be inside
    another policy. With `exact=True` it is the policy that was measured to draft fastest,
    `verified`, or else `dense`.
    """

    def for_spec(spec: CacheSpec) -> Policy:
        chosen = choose(spec)
        if not chosen.measured:
            _log(chosen.reason, spec.model)
        return chosen.policy

    def to_draft(spec: CacheSpec) -> Policy:
        chosen = choose_draft(spec)
        if not chosen.measured:
            _log(chosen.reason, spec.model, drafts=True)
        return chosen.policy

    return StandIn(for_spec, to_draft)


def choose(spec: CacheSpec) -> AutoChoice:
    """Returns the policy of `auto` for a cache of these sizes, and the reason.

    Raises:
        ValueError: the file of choices is damaged, or names an unknown policy.
    """
    device = jax.local_devices()[0].device_kind
    found = choices.find(spec, device)
    if found is not None:
        return AutoChoice(parse(found.policy), str(found))
    measured = break_evens()
    if measured is None:
        reason = f"this model has not been measured at this size on this device ({device})"
        return AutoChoice(dense(), reason, measured=False)
    if layer_bytes(spec) < measured.over_all_pages:
        return AutoChoice(dense(), f"as fast as others at this size on this device ({device})")
    return AutoChoice(CHOICE, f"faster than dense attention at this size on this device ({device})")


def choose_draft(spec: CacheSpec) -> AutoChoice:
    """Returns the draft policy of `auto` for `exact=True`, and the reason."""
    device = jax.local_devices()[0].device_kind
    measured = break_evens()
    if measured is None or measured.drafting is None:
        reason = f"drafts have not been measured on this device ({device})"
        return AutoChoice(dense(), reason, measured=False)
    if layer_bytes(spec) < measured.drafting:
        reason = f"drafts were measured to pay only at larger sizes on this device ({device})"
        return AutoChoice(dense(), reason)
    return AutoChoice(DRAFTING, f"its drafts pay at this size on this device ({device})")


def layer_bytes(spec: CacheSpec) -> int:
    """Returns the bytes of K and V of one layer with all rows full."""
    tokens = spec.batch * spec.num_kv_heads * spec.capacity
    return tokens * spec.slot_bytes


@functools.cache
def _log(reason: str, model: str, *, drafts: bool = False) -> None:
    """Warns, once, that only dense attention is known to be good here."""
    hint = f"; `jsparse recommend {model or 'MODEL'}` measures it" if not drafts else ""
    logger.warning("policy=auto is dense() here: %s%s", reason, hint)
