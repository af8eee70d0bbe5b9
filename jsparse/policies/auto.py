"""Chooses a method by measurements on this device: dense attention where that is as fast.

`jsparse recommend` measures a model on the device at hand, and its result comes first. Else it is
Twilight on a device for which we measured the bytes of K and V above which it is faster, and dense
attention on all others, CPUs among them. Where dense attention checks what is drafted, nothing need
be close to it: the cheapest method of those that agree most drafts, from other sizes on.
"""

import functools
import logging
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jsparse.builder import builder, dense
from jsparse.cache import CacheSpec
from jsparse.policies import choices
from jsparse.policies.all_pages import all_pages
from jsparse.policies.break_evens import break_evens
from jsparse.policies.expressions import parse
from jsparse.policies.twilight import twilight
from jsparse.policies.verified import verified
from jsparse.policy import Policy, StandIn

# The fastest method measured whose KL divergence from dense attention is at most 0.005 on SmolLM2,
# at 4K and 8K tokens (docs/results/twilight.md).
CHOICE = twilight(all_pages(), p=0.95)
# What drafts where dense attention checks it, the fastest of those measured (docs/exact.md).
DRAFTING = verified(budget=512)

logger = logging.getLogger("jsparse.auto")


class AutoChoice(NamedTuple):
    """Holds the policy that `auto` stands for, the reason, and whether it was measured."""

    policy: Policy
    reason: str
    measured: bool = True


@builder
def auto() -> StandIn:
    """Uses the fastest policy measured for this device and size that stays close to dense.

    This is the choice of `jsparse recommend` for the model on this device, else Twilight from the
    sizes on at which it was faster on devices that we measured, else `dense`. That is decided when
    the cache's sizes are known, before anything is read; `Generation.stats.policy` and `jsparse
    info --policy auto` show the choice. It cannot stand inside another policy. With `exact=True` it
    is the policy that was measured to draft fastest, `verified`, or `dense`.
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
    """Returns the policy that `auto` stands for with a cache of these sizes, and why.

    Raises:
        ValueError: the file of choices is damaged, or names a policy that there is not.
    """
    device = jax.local_devices()[0].device_kind
    found = choices.find(spec, device)
    if found is not None:
        return AutoChoice(parse(found.policy), str(found))
    measured = break_evens()
    if measured is None:
        reason = f"nobody has measured this model and size on this device ({device})"
        return AutoChoice(dense(), reason, measured=False)
    if layer_bytes(spec) < measured.over_all_pages:
        return AutoChoice(dense(), f"as fast as others at this size on this device ({device})")
    return AutoChoice(CHOICE, f"faster than dense attention at this size on this device ({device})")


def choose_draft(spec: CacheSpec) -> AutoChoice:
    """Returns the policy that drafts for `auto` where dense attention checks it, and why."""
    device = jax.local_devices()[0].device_kind
    measured = break_evens()
    if measured is None or measured.drafting is None:
        reason = f"nobody has measured drafts on this device ({device})"
        return AutoChoice(dense(), reason, measured=False)
    if layer_bytes(spec) < measured.drafting:
        reason = f"drafts were measured to pay from larger sizes on, on this device ({device})"
        return AutoChoice(dense(), reason)
    return AutoChoice(DRAFTING, f"its drafts pay at this size on this device ({device})")


def layer_bytes(spec: CacheSpec) -> int:
    """Returns the bytes of K and V of one layer, all rows full."""
    tokens = spec.batch * spec.num_kv_heads * spec.capacity
    return 2 * tokens * spec.head_dim * jnp.dtype(spec.dtype).itemsize


@functools.cache
def _log(reason: str, model: str, *, drafts: bool = False) -> None:
    """Warns, once, that only dense attention is known to be good here."""
    hint = f"; `jsparse recommend {model or 'MODEL'}` does" if not drafts else ""
    logger.warning("policy=auto is dense() here: %s%s", reason, hint)
