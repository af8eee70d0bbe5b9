"""Shares one prefill among all policies with the same prefill method.

Each policy's `prefill` hooks run after each chunk. Each policy then decodes from its own copy of
the cache, with its own state, exactly as it would alone: with the last W queries and the cache
fields that it requested, whatever the others requested. While a policy decodes, one copy of the
cache exists besides the shared one.
"""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jsparse.builder import dense
from jsparse.cache import OPTIONAL_FIELDS, CacheSpec, KVCache, ReadOnly
from jsparse.hooks import State
from jsparse.models.checkpoint import Params
from jsparse.models.transformer import Decoder
from jsparse.policies.expressions import as_policy
from jsparse.policy import AnyPolicy, Policy, PrefillMethod
from jsparse.runtime import capacity, chunk_attention, generate_options, turn
from jsparse.runtime.compilation import clock, keep_compilations, program, waited
from jsparse.runtime.constants import constants as own_constants
from jsparse.runtime.host_reader import Generation, OnChunk
from jsparse.runtime.prefill import (
    PrefillCarry,
    PromptChunk,
    chunks,
    prefill_chunk,
    replay_chunk,
    settle,
)
from jsparse.runtime.prefill import start as prefill_start
from jsparse.runtime.request import requests
from jsparse.runtime.rereading import reread_prompts
from jsparse.runtime.sampling_params import OFF
from jsparse.runtime.session import Session
from jsparse.runtime.session_prefill import PrefillResult, first_logits, padded
from jsparse.runtime.spread_programs import by_rank
from jsparse.runtime.store import empty_rows_on
from jsparse.shapes import Rows, Tokens
from jsparse.text import prompts


class SharedPrefill(NamedTuple):
    """Prompts prefilled for several policies.

    Attributes:
        names: the policies as requested; "auto" resolves to another.
        policies: those that run.
        prefilled: for each policy, the logits after the prompts, the cache with every field that
            any policy of the same prefill method needs, and its state. Such policies share arrays.
    """

    params: Params
    spec: CacheSpec
    names: tuple[str, ...]
    policies: tuple[Policy, ...]
    prefilled: tuple[PrefillResult, ...]

    def session(self, index: int, *, drafts: int | None = 0) -> Session:
        """Returns a session of policy `index`, on copies, since decoding donates its inputs.

        `drafts`: the tokens that it drafts for dense attention to verify; None: the fastest number.
        """
        policy = self.policies[index]
        session = Session(self.params, policy, self.spec, adopts=True, drafts=drafts)
        made = self.prefilled[index]
        own = made._replace(cache=_with_fields(made.cache, policy.needs))
        session.adopt(jax.tree.map(jnp.copy, own))
        return session

    def with_policy(self, policy: Policy) -> "SharedPrefill":
        """Returns the first policy's prompts for another one, which must have no state."""
        state = policy.init(self.spec)
        if jax.tree.leaves(state) or policy.needs or policy.window:
            raise ValueError(f"policy={policy}: must keep nothing of the prompt but K and V")
        return self._replace(
            names=(policy.name,),
            policies=(policy,),
            prefilled=(self.prefilled[0]._replace(state=state),),
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
    expect: Callable[[int, Session], Any] = lambda *_: None,
) -> SharedPrefill:
    """Prefills the prompts once per prefill method, with all rows in one batch.

    `drafts` is the number of tokens that the policies will draft at a time. `expect` receives each
    policy's index and a session of its own before prefill, to start compiling what it will run.

    Raises:
        ValueError: the cache and all states do not fit in memory.
    """
    keep_compilations()
    # one by one, since otherwise errors would name the bundle; memory must fit them all
    sessions = [Session(params, policy, spec, adopts=True, drafts=drafts) for policy in policies]
    running = tuple(session.deployment.policy for session in sessions)
    groups = dict.fromkeys(policy.prefill_method for policy in running)
    capacity.require_fit(spec._replace(batch=len(groups) * spec.batch), bundle(running))
    constants = [ReadOnly(session.deployment.constants(report)) for session in sessions]

    def begun() -> None:
        for index, session in enumerate(sessions):
            expect(index, session)

    prefilled: dict[int, PrefillResult] = {}
    with capacity.exhaustion(spec):
        for nth, method in enumerate(groups):
            own = [at for at, policy in enumerate(running) if policy.prefill_method is method]
            of_group = [running[at] for at in own], [constants[at] for at in own]
            first = begun if nth == 0 else lambda: None
            made = _prefilled(params, *of_group, rows, spec, report, first)
            prefilled |= zip(own, made, strict=True)
    results = tuple(prefilled[at] for at in range(len(running)))
    return SharedPrefill(params, spec, tuple(map(str, policies)), running, results)


def _prefilled(
    params: Params,
    policies: Sequence[Policy],
    constants: Sequence[ReadOnly],
    rows: list[list[int]],
    spec: CacheSpec,
    report: OnChunk,
    begun: Callable[[], None],
) -> list[PrefillResult]:
    """Prefills the prompts, and shows each chunk to every policy in a program of its own.

    All policies have the same prefill method.

    A policy's programs do not depend on the others, and all of them compile concurrently, before
    those that `begun` starts to compile.
    """
    decoder, mesh, prompts = params.decoder, params.mesh, padded(rows, spec)
    method, longest = policies[0].prefill_method, prompts.tokens.shape[1]
    chunk = chunk_attention.chunk_tokens(spec, method)
    # one size, so that prompts of all lengths run the same programs
    size = chunk_attention.chunk_sizes(spec.capacity, chunk)[0]
    parts = [*chunks(prompts.tokens, prompts.lengths, [size] * -(-longest // size))]
    reader = _reader(policies)
    run, observed = prefill_chunk.on(mesh), observe.on(mesh)
    read_only = ReadOnly(own_constants(params, reader))
    start = by_rank(prefill_start, mesh, sharded=("cache", "state"), static=("decoder", "policy"))
    carry = start(decoder, reader, *empty_rows_on(mesh)(spec, reader))
    states = [by_rank(first_state, mesh, static=("policy", "spec"))(p, spec) for p in policies]

    def arrays(part: PromptChunk, nth: int) -> tuple[Any, ...]:
        return part.tokens, part.valid, carry, states[nth], constants[nth]

    watching = [nth for nth, policy in enumerate(policies) if policy.uses_last_chunk]
    first, shapes = parts[0], partial(jax.tree.map, _shape)
    arguments = decoder, reader, params.weights
    run.ahead(*arguments, *shapes((*first[:2], carry)), read_only, last=False)
    for last in (False, True) if len(parts) > 1 else (True,):
        for nth in watching:
            observed.ahead(decoder, policies[nth], *shapes(arrays(first, nth)), last=last)
    begun()
    try:
        for part in parts:
            carry = run(*arguments, part.tokens, part.valid, carry, read_only, last=False)
            for nth in watching:
                last = part is parts[-1]
                states[nth] = observed(decoder, policies[nth], *arrays(part, nth), last=last)
            report("prefill", min(part.end, longest), longest)
        for nth, policy in enumerate(policies):
            states[nth] = reread_prompts(
                *(decoder, policy, params.weights, prompts.tokens),
                *(_with_fields(carry.cache, policy.needs), states[nth], constants[nth]),
                mesh=mesh,
            )
    except BaseException:
        settle(carry, states)
        raise
    logits = first_logits.on(mesh)(decoder, params.weights, carry.last_hidden)
    return [PrefillResult(logits, carry.cache, state) for state in states]


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    place = x.sharding if x.committed else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)


@partial(jax.jit, static_argnames=("policy", "spec"))
def first_state(policy: Policy, spec: CacheSpec) -> State:
    """Returns the policy's initial state."""
    return policy.init(spec)


@program(
    static_argnames=("decoder", "policy", "last"),
    donate_argnames=("state",),
    sharded=("carry", "state"),
)
def observe(
    decoder: Decoder,
    policy: Policy,
    tokens: Tokens,
    valid: Rows,
    carry: PrefillCarry,
    state: State,
    read_only: ReadOnly,
    *,
    last: bool,
) -> State:
    """Shows a policy a chunk that `carry` already holds, as if it were the only policy.

    Arguments are those of `replay_chunk`; the carry may have more queries and cache fields than the
    policy needs.
    """
    own = carry._replace(
        state=state,
        cache=_with_fields(carry.cache, policy.needs),
        windows=tuple(window[:, window.shape[1] - policy.window :] for window in carry.windows)
        if policy.window
        else (),
    )
    return replay_chunk(decoder, policy, tokens, valid, own, read_only, last=last).state


def bundle(policies: Sequence[Policy]) -> Policy:
    """Builds a policy with the tuple of all policies' states, to compute the memory they need."""

    def init(spec: CacheSpec) -> State:
        return tuple(policy.init(spec) for policy in policies)

    name = f"bundle({', '.join(map(str, policies))})"
    return _reader(policies)._replace(init=init, name=name)


def _reader(policies: Sequence[Policy]) -> Policy:
    """Returns a policy that prefills whatever any of these needs, by the first one's method."""
    fields = {name for policy in policies for name in policy.fields}
    window = max(policy.window for policy in policies)
    return _reading(window, tuple(sorted(fields)), policies[0].prefill_method)


@functools.cache
def _reading(window: int, fields: tuple[str, ...], method: PrefillMethod | None) -> Policy:
    name = f"reading({window}, {fields}, {method})"
    return dense()._replace(window=window, needs=fields, prefill_method=method, name=name)


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
    """Runs `jsparse.generate` greedily for several policies, with shared prefills.

    Progress of "decode" restarts for each policy. `questions` are ids that follow each prompt in a
    second turn, fed through decode steps after the prompt was compressed. `drafts` is the number of
    tokens that policies draft at a time for dense attention to verify.

    Returns:
        [policy][prompt]; `prefill_seconds` is the time of all prefills, one per prefill method.
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

    def expect(index: int, session: Session) -> None:
        turn.expect(session, asked, report, questions)

    shared = prime(params, chosen, rows, spec, report, drafts=drafts, expect=expect)
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


def _with_fields(cache: KVCache, fields: tuple[str, ...]) -> KVCache:
    """Returns the cache with only those optional fields that are in `fields`."""
    others = dict.fromkeys(name for name in OPTIONAL_FIELDS if name not in fields)
    return cache._replace(layers=tuple(layer._replace(**others) for layer in cache.layers))
