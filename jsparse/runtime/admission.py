"""Checks that a model, a policy and sizes go together, once, before anything is allocated.

Sessions and engines use the same checks in the same order: which policy runs, whether the model has
the constants that it needs, whether it supports the use that is planned, whether K and V can lie in
its memory, and whether everything fits.
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

# steps per program on a GPU
STEPS_PER_PROGRAM = 8


class Deployment(NamedTuple):
    """Holds a model and a policy that go together, with the sizes that they run with.

    Attributes:
        params: the model.
        policy: the policy that runs; never a StandIn.
        spec: the sizes of the cache.
        store: where K and V lie.
        max_steps: the most decode steps per program.
        drafts: the most tokens that the policy drafts between two checks; 0 where it decodes, as a
            policy does that is dense anyway.
        adapts: whether fewer are drafted where that is faster.
    """

    params: Params
    policy: Policy
    spec: CacheSpec
    store: KVStore
    max_steps: int
    drafts: int
    adapts: bool

    def constants(self, report: OnChunk = lambda *_: None) -> dict[str, Array] | None:
        """Returns the constants of the model that the policy needs, as `runtime.constants` does."""
        return constants(self.params, self.policy, report)

    @property
    def keeps_generated(self) -> bool:
        """Whether K and V of generated tokens are dense attention's, as those of prompts are."""
        return self.drafts > 0 or is_dense(self.policy, self.spec)


def admit(
    params: Params,
    asked: AnyPolicy,
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
        asked: the policy, or a StandIn for one.
        spec: the sizes of the cache.
        further_turns: whether rows will be cut back to their prompts' ends and read on.
        rows_join: whether rows will join and leave while others decode.
        per_request: hyper-parameters that rows which join may set.
        steps_per_program: the most decode steps per program; None is 8 on a GPU, 1 elsewhere.
        allocates: whether a cache of these sizes will be allocated, and must fit in memory.
        drafts: the tokens that the policy drafts before dense attention checks them; 0 is that it
            does not draft, None that as many are drafted as is fastest.

    Raises:
        ValueError: the model lacks a constant that the policy needs, the policy does not
            support this use, or memory does not suffice.
    """
    policy = resolved(asked, spec, drafts=drafts != 0)
    store = store_of(policy, spec, params.mesh)
    if not rows_join:
        require_in_one_process(params)
    require_constants(params, policy)
    if policy.evicts and policy.services.correct_every:
        raise ValueError(
            f"correct_every={policy.services.correct_every}: must be 0 where the policy evicts, "
            "since heads then hold different tokens"
        )
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
                f"steps_per_program={steps_per_program}: must be 1 where K and V lie in host "
                "memory, which a loop of steps cannot take"
            )
        steps_per_program = 1
    if allocates:
        capacity.require_fit(spec, policy)
    max_steps = steps_per_program or (STEPS_PER_PROGRAM if on_gpu else 1)
    return Deployment(params, policy, spec, store, max_steps, drafts, adapts)


def require_resumable(policy: Policy, spec: CacheSpec) -> None:
    """Raises ValueError if a policy's rows cannot be cut back to a prompt's end and read on."""
    state_axes(policy, spec)  # refuses a state whose arrays belong to neither rows nor pages
    if policy.evicts:
        raise ValueError(
            f"policy={policy}: must leave the cache as it is after the prompt, for a further dense "
            "chunk to follow"
        )


def require_drafting(policy: Policy, spec: CacheSpec) -> None:
    """Raises ValueError if dense attention cannot check what a policy drafts."""
    reasons = {
        "evicts tokens": policy.evicts,
        "keeps K and V in host memory": on_host(policy),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(
                f"policy={policy}: must keep all K and V on the device where dense attention "
                f"checks what it drafts (exact=True), but {reason}"
            )
    state_axes(policy, spec)  # refuses a state whose arrays belong to neither rows nor pages


def settable(policy: Policy) -> frozenset[str]:
    """Returns the names that `per_request` may have under a policy."""
    dense = () if policy.evicts else ("dense",)  # dropped tokens cannot be attended to
    return frozenset((*dense, *policy.per_row))


def _require_joinable(policy: Policy, spec: CacheSpec, per_request: Sequence[str]) -> None:
    """Raises ValueError if rows cannot share a pool of pages, or may not set one of these names."""
    if policy.evicts and any(axis.kind == "page" for axis in state_axes(policy, spec)):
        raise ValueError(
            f"policy={policy}: must have no state of pages where rows join, since it evicts: a row "
            "leaves its prompt's pages; jsparse.generate takes it"
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
