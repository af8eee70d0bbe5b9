"""Checks once, before anything is allocated, that a model, a policy and sizes fit together.

Sessions and engines run the same checks in the same order: which policy runs, whether the model has
the constants that it needs, whether it supports the planned use, whether its store of K and V is
supported, and whether everything fits in memory.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jaxtyping import Array

from jsparse.cache import CacheSpec
from jsparse.hyper_parameters import whole_number
from jsparse.models.checkpoint import Params, require_in_one_process
from jsparse.policy import AnyPolicy, Policy, is_dense, resolved
from jsparse.runtime import capacity
from jsparse.runtime.constants import constants, require_constants
from jsparse.runtime.draft_length import most_drafts
from jsparse.runtime.prefill import OnChunk
from jsparse.runtime.state_axes import state_axes
from jsparse.runtime.store import KVStore, on_host, store_of
from jsparse.selection import MAX_BITS_PAGE

# steps per program on a GPU
STEPS_PER_PROGRAM = 8


class Deployment(NamedTuple):
    """A model and a policy that fit together, with the sizes that they run with.

    Attributes:
        params: the model.
        policy: the policy that runs; never a StandIn.
        spec: the sizes of the cache.
        store: the store of K and V.
        max_steps: the maximum number of decode steps per program.
        drafts: the maximum number of drafts per verification round; 0: no drafting, which includes
            policies that are always dense.
        adapts: whether fewer tokens are drafted if that is faster.
    """

    params: Params
    policy: Policy
    spec: CacheSpec
    store: KVStore
    max_steps: int
    drafts: int
    adapts: bool

    def constants(self, report: OnChunk = lambda *_: None) -> dict[str, Array] | None:
        """Returns the model's constants that the policy needs; see `runtime.constants`."""
        return constants(self.params, self.policy, report)

    @property
    def keeps_generated(self) -> bool:
        """Whether K and V of generated tokens come from dense attention, like those of prompts."""
        return self.drafts > 0 or is_dense(self.policy, self.spec)


def admit(
    params: Params,
    requested: AnyPolicy,
    spec: CacheSpec,
    *,
    further_turns: bool = False,
    rows_join: bool = False,
    per_request: Sequence[str] = (),
    steps_per_program: int | None = None,
    allocates: bool = True,
    drafts: int | None = 0,
) -> Deployment:
    """Admits a policy if it can run with these sizes; nothing is allocated.

    Args:
        params: the model.
        requested: the policy, or a StandIn for one.
        spec: the sizes of the cache.
        further_turns: whether rows will be truncated to their prompts' ends and prefilled further.
        rows_join: whether rows will join and leave while others decode.
        per_request: hyper-parameters that joining rows may set.
        steps_per_program: the maximum number of decode steps per program; None: 8 on a GPU, 1
            elsewhere.
        allocates: whether a cache of these sizes will be allocated, and must fit in memory.
        drafts: the number of tokens that the policy drafts per verification round; 0: no drafting;
            None: the fastest number.

    Raises:
        ValueError: the model lacks a constant that the policy needs, the policy does not support
            this use, or memory does not suffice.
    """
    policy = resolved(requested, spec, drafts=drafts != 0)
    store = store_of(policy, spec, params.mesh)
    if not rows_join:
        require_in_one_process(params)
    require_constants(params, policy)
    if policy.evicts and policy.services.correct_every:
        raise ValueError(
            f"correct_every={policy.services.correct_every}: must be 0 if the policy evicts, "
            "since heads then hold different tokens"
        )
    if params.config.windowed(spec.capacity):
        _require_windows(policy, spec)
    adapts, on_gpu = drafts is None, jax.default_backend() == "gpu"
    if drafts is None:
        drafts = most_drafts(spec.batch, on_gpu=on_gpu)
    if drafts:
        require_drafting(policy, spec)
        drafts = 0 if is_dense(policy, spec) else drafts
    if further_turns:
        require_resumable(policy, spec)
    if rows_join:
        _require_joinable(policy, spec, per_request)
    if steps_per_program is not None:
        whole_number("steps_per_program", steps_per_program, 1)
    store.require()
    if store.single_steps:
        if steps_per_program not in (None, 1):
            raise ValueError(
                f"steps_per_program={steps_per_program}: must be 1 with K and V in host "
                "memory, which a loop of steps does not support"
            )
        steps_per_program = 1
    if allocates:
        capacity.require_fit(spec, policy)
    max_steps = steps_per_program or (STEPS_PER_PROGRAM if on_gpu else 1)
    return Deployment(params, policy, spec, store, max_steps, drafts, adapts)


def _require_windows(policy: Policy, spec: CacheSpec) -> None:
    """Raises ValueError if layers cannot attend to exactly their windows of newest tokens."""
    if policy.evicts:
        raise ValueError(
            f"policy={policy}: must keep every token, since some layers of the model have a "
            f"sliding window below the {spec.capacity} tokens of a row"
        )
    if spec.page_size > MAX_BITS_PAGE:
        raise ValueError(
            f"page_size={spec.page_size}: must be at most {MAX_BITS_PAGE} for a model with sliding "
            "windows, which start within pages"
        )


def require_resumable(policy: Policy, spec: CacheSpec) -> None:
    """Raises ValueError if rows cannot be truncated to a prompt's end and prefilled further."""
    state_axes(policy, spec)  # refuses a state whose arrays belong to neither rows nor pages
    if policy.evicts:
        raise ValueError(
            f"policy={policy}: must not change the cache after the prompt, so that a further "
            "dense chunk can follow"
        )


def require_drafting(policy: Policy, spec: CacheSpec) -> None:
    """Raises ValueError if dense attention cannot verify a policy's drafts."""
    reasons = {
        "evicts tokens": policy.evicts,
        "keeps K and V in host memory": on_host(policy),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(
                f"policy={policy}: must keep all K and V on the device if dense attention "
                f"verifies its drafts (exact=True), but {reason}"
            )
    state_axes(policy, spec)  # refuses a state whose arrays belong to neither rows nor pages


def settable(policy: Policy) -> frozenset[str]:
    """Returns the names allowed in `per_request` under a policy."""
    dense = () if policy.evicts else ("dense",)  # evicting policies cannot attend to dropped tokens
    return frozenset((*dense, *policy.per_row))


def _require_joinable(policy: Policy, spec: CacheSpec, per_request: Sequence[str]) -> None:
    """Raises ValueError if rows cannot share a pool of pages, or may not set one of these names."""
    if policy.evicts and any(axis.kind == "page" for axis in state_axes(policy, spec)):
        raise ValueError(
            f"policy={policy}: must have no page arrays in its state in an engine, since it "
            "evicts: a row leaves its prompt's pages; jsparse.generate supports it"
        )
    if isinstance(per_request, str) or not isinstance(per_request, Sequence):
        raise ValueError(f"per_request={per_request!r}: must be a list of names")
    allowed = settable(policy)
    for name in per_request:
        if name not in allowed:
            raise ValueError(
                f"per_request={tuple(per_request)}: must be among {sorted(allowed)}, which "
                f"{policy} lets rows set"
            )
    state_axes(policy, spec)  # as above
