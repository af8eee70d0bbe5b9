"""Shares one prefill among several policies: prefill is dense for every policy.

Each policy's `prefill` hooks run over that one pass. Each policy then decodes from its own copy of
the cache, with its own state, exactly as it would alone: with the last W queries and the cache
fields that it requested, whatever the others requested. While a policy decodes, one copy of the
cache exists besides the shared one.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jsparse.builder import dense
from jsparse.cache import OPTIONAL_FIELDS, CacheSpec, KVCache, StepView
from jsparse.hooks import PrefillView, State
from jsparse.models.checkpoint import Params
from jsparse.policies.expressions import as_policy
from jsparse.policy import AnyPolicy, Policy
from jsparse.runtime import capacity, generate_options, turn
from jsparse.runtime.admission import admit
from jsparse.runtime.compilation import clock, keep_compilations, waited
from jsparse.runtime.host_reader import Generation, OnChunk
from jsparse.runtime.request import requests
from jsparse.runtime.sampling_params import OFF
from jsparse.runtime.session import PrefillResult, Session
from jsparse.text import prompts


class SharedPrefill(NamedTuple):
    """Prompts prefilled for several policies.

    Attributes:
        names: the policies as requested; "auto" resolves to another.
        policies: those that run.
        prefilled: the dense logits after the prompts, the cache with every field that any policy
            needs, and a tuple of the policies' states.
    """

    params: Params
    spec: CacheSpec
    names: tuple[str, ...]
    policies: tuple[Policy, ...]
    prefilled: PrefillResult

    def session(self, index: int, *, drafts: int | None = 0) -> Session:
        """Returns a session of policy `index`, on copies, since decoding donates its inputs.

        `drafts`: the tokens that it drafts for dense attention to verify; None: the fastest number.
        """
        policy = self.policies[index]
        cache, state = _with_fields(self.prefilled.cache, policy.needs), self.prefilled.state[index]
        session = Session(self.params, policy, self.spec, adopts=True, drafts=drafts)
        own = PrefillResult(self.prefilled.logits, cache, state)
        session.adopt(jax.tree.map(jnp.copy, own))
        return session

    def with_policy(self, policy: Policy) -> "SharedPrefill":
        """Returns the same prompts as if prefilled for another policy, which must have no state."""
        state = policy.init(self.spec)
        if jax.tree.leaves(state) or policy.needs or policy.window:
            raise ValueError(f"policy={policy}: must keep nothing of the prompt but K and V")
        return self._replace(
            names=(policy.name,),
            policies=(policy,),
            prefilled=self.prefilled._replace(state=(state,)),
        )


def as_policies(policies: Sequence[AnyPolicy | str]) -> tuple[AnyPolicy, ...]:
    """Returns the policies of a list of policies or their expressions, at least one."""
    if isinstance(policies, str | AnyPolicy) or not policies:
        raise ValueError(f"policies={policies!r}: must be a list of at least one policy")
    return tuple(map(as_policy, policies))


def prime(
    params: Params,
    policies: tuple[AnyPolicy, ...],
    rows: list[list[int]],
    spec: CacheSpec,
    report: OnChunk,
    *,
    drafts: int = 0,
) -> SharedPrefill:
    """Prefills the prompts once for all policies, with all rows in one batch.

    `drafts`: the number of tokens that the policies will draft at a time.

    Raises:
        ValueError: the cache and all states do not fit in memory.
    """
    keep_compilations()
    # one by one, since otherwise errors would name the bundle; memory must fit them all
    running = tuple(
        admit(params, policy, spec, allocates=False, drafts=drafts).policy for policy in policies
    )
    session = Session(params, bundle(running), spec)
    with capacity.exhaustion(spec):
        session.prefill(rows, report)
    return SharedPrefill(params, spec, tuple(map(str, policies)), running, session.prefilled)


@functools.cache
def bundle(policies: tuple[Policy, ...]) -> Policy:
    """Builds a policy with the tuple of all policies' states, for prefill only."""

    def init(spec: CacheSpec) -> State:
        return tuple(policy.init(spec) for policy in policies)

    def prefill(state: State, layer: int, view: PrefillView) -> State:
        return tuple(
            p.prefill(s, layer, _view_of(p, view)) for p, s in zip(policies, state, strict=True)
        )

    def select(*_: Any):
        raise ValueError(
            f"policy={name}: a bundle only reads prompts, each of its policies must decode alone"
        )

    name = f"bundle({', '.join(map(str, policies))})"
    needs = tuple(sorted({name for policy in policies for name in policy.needs}))
    window = max(policy.window for policy in policies)
    return Policy(select, init=init, prefill=prefill, window=window, needs=needs, name=name)


def generate(
    params: Params,
    policies: Sequence[AnyPolicy | str],
    prompt: Any,
    *,
    max_new_tokens: int = 128,
    stop: str | Sequence[str] = (),
    eos_token_id: int | Sequence[int] | None = None,
    max_length: int | None = None,
    page_size: int = 16,
    on_progress: OnChunk | None = None,
    questions: Sequence[Sequence[int]] | None = None,
    drafts: int = 0,
) -> list[list[Generation]]:
    """Runs `jsparse.generate` greedily for several policies, with one prefill of the prompts.

    Progress of "decode" restarts for each policy. `questions` are ids that follow each prompt in a
    second turn, fed through decode steps after the prompt was compressed. `drafts` is the number of
    tokens that policies draft at a time for dense attention to verify.

    Returns:
        [policy][prompt]; `prefill_seconds` is as if each policy had prefilled the prompt itself.
    """
    rows, _ = prompts.encode(params, prompt)
    options = generate_options.sampling_params(
        params,
        max_new_tokens=max_new_tokens,
        stop=stop,
        eos_token_id=eos_token_id,
        logprobs=True,
        **OFF,
    )
    if questions is not None and len(questions) != len(rows):
        raise ValueError(
            f"questions has {len(questions)} entries: must be {len(rows)}, one per prompt"
        )
    new = [len(ids) + max_new_tokens for ids in questions or [()] * len(rows)]
    spec = capacity.cache_spec(params, rows, new, max_length, page_size)
    report = on_progress or (lambda *_: None)
    chosen = as_policies(policies)
    # no option depends on a policy: the requests are the same for all
    asked = requests(params, rows, options, dense())
    began, waits = clock(), waited()
    shared = prime(params, chosen, rows, spec, report, drafts=drafts)
    jax.block_until_ready(shared.prefilled)
    read, waits = clock() - began, waited() - waits

    def decode(index: int) -> list[Generation]:
        silent = [lambda piece: None] * len(rows)
        since = clock() - read, waited() - waits
        with capacity.exhaustion(spec):
            session = shared.session(index, drafts=drafts)
            made = turn.answers(session, asked, silent, report, *since, questions)
        if any(out.finish_reason == "overflow" for out in made):
            raise ValueError(
                f"policy={chosen[index]}: must leave room in the cache for the whole answer"
            )
        return made

    return [decode(index) for index in range(len(chosen))]


def _view_of(policy: Policy, view: PrefillView) -> PrefillView:
    """Returns the view that the policy would have alone."""
    cache, constants = _with_fields(view.step.cache, policy.needs), view.step.constants or {}
    own = {name: constants[name] for name in policy.constants} or None
    return view._replace(
        step=StepView(cache, own),
        q_window=view.q_window[:, view.q_window.shape[1] - policy.window :],
        window_valid=jnp.minimum(view.window_valid, policy.window),
    )


def _with_fields(cache: KVCache, fields: tuple[str, ...]) -> KVCache:
    """Returns the cache with only those optional fields that are in `fields`."""
    others = dict.fromkeys(name for name in OPTIONAL_FIELDS if name not in fields)
    return cache._replace(layers=tuple(layer._replace(**others) for layer in cache.layers))
