"""Reads prompts once for several policies: prefill is dense whatever the policy, so they share it.

Each policy's `prefill` hooks run over that one pass. Each policy then decodes from its own copy of
the cache, with its own state, as if it had been alone: it sees the last W queries that it asked for
and the cache fields that it needs, however much the others want. One copy of the cache exists
besides the shared one while a policy decodes.
"""

import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from jsparse import generation, prompts
from jsparse.cache import OPTIONAL_FIELDS, CacheSpec, KVCache
from jsparse.host_reader import Generation, OnProgress, Reader, Row
from jsparse.models.checkpoint import Params
from jsparse.policies.expressions import as_policy
from jsparse.policy import Policy, PrefillView, State
from jsparse.runtime import capacity, session
from jsparse.runtime.compilation import keep_compilations
from jsparse.runtime.sampling import Sampling
from jsparse.text_stream import TextStream


class Shared(NamedTuple):
    """Holds prompts that were read for several policies.

    Attributes:
        policies: the policies, in the order of `states`.
        logits: the dense logits that follow the prompts.
        cache: the cache, with every field that any policy needs.
        states: the state of each policy.
    """

    policies: tuple[Policy, ...]
    logits: Float32[Array, "B V"]
    cache: KVCache
    states: tuple[State, ...]

    def primed(self, index: int) -> session.Primed:
        """Returns what policy `index` decodes from: copies, since decoding donates them."""
        own = _with_fields(self.cache, self.policies[index].needs), self.states[index]
        return session.Primed(self.logits, *jax.tree.map(jnp.copy, own))


def as_policies(policies: Sequence[Policy | str]) -> tuple[Policy, ...]:
    """Returns the policies of a list of policies or their expressions.

    Raises:
        ValueError: the list is empty, or a policy is not in a list.
    """
    if isinstance(policies, str | Policy) or not policies:
        raise ValueError(f"policies={policies!r}: must be a list of at least one policy")
    return tuple(map(as_policy, policies))


def prime(
    params: Params,
    policies: tuple[Policy, ...],
    rows: list[list[int]],
    spec: CacheSpec,
    report: OnProgress,
) -> Shared:
    """Reads the prompts once for all policies, with all rows in one batch.

    Raises:
        ValueError: the cache and all states do not fit in memory.
    """
    keep_compilations()
    bundled = bundle(policies)
    capacity.require_fit(spec, bundled)
    with capacity.exhaustion(spec):
        return Shared(policies, *session.prime(params, bundled, rows, spec, report))


@functools.cache
def bundle(policies: tuple[Policy, ...]) -> Policy:
    """Builds the policy whose state is the tuple of all policies' states.

    It only reads prompts; each of the policies decodes alone.
    """

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
    needs = tuple(
        field for field in OPTIONAL_FIELDS if any(field in policy.needs for policy in policies)
    )
    window = max(policy.window for policy in policies)
    return Policy(select, init=init, prefill=prefill, window=window, needs=needs, name=name)


def generate(
    params: Params,
    policies: Sequence[Policy | str],
    prompt: Any,
    *,
    max_new_tokens: int = 128,
    stop: str | Sequence[str] = (),
    eos_token_id: int | Sequence[int] | None = None,
    max_length: int | None = None,
    page_size: int = 16,
    on_progress: OnProgress | None = None,
) -> list[list[Generation]]:
    """Runs `jsparse.generate` greedily for several policies, and reads the prompts once.

    Arguments and errors are those of `jsparse.generate`, without sampling and streamers. Progress
    of "decode" starts again for each policy.

    Returns:
        [policy][prompt]; `prefill_seconds` is the time until the first token, as if each policy had
        read the prompt itself.
    """
    rows, _ = prompts.encode(params, prompt)
    stop, ends = generation.stop_strings(params, stop), generation.end_tokens(params, eos_token_id)
    spec = generation.cache_spec(params, rows, max_new_tokens, max_length, page_size)
    report = on_progress or (lambda *_: None)
    chosen = as_policies(policies)
    began = time.perf_counter()
    shared = prime(params, chosen, rows, spec, report)
    jax.block_until_ready(shared)
    read = time.perf_counter() - began

    def decode(index: int) -> list[Generation]:
        reader = Reader(
            [Row(TextStream(params.tokenizer, stop), ends, _ignore) for _ in rows],
            max_new_tokens,
            report,
        )
        began = time.perf_counter() - read
        with capacity.exhaustion(spec):
            session.decode(params, chosen[index], Sampling(), rows, shared.primed(index), 0, reader)
        return [reader.generation(i, len(ids), began, logprobs=True) for i, ids in enumerate(rows)]

    return [decode(index) for index in range(len(chosen))]


def _ignore(piece: str) -> None:
    pass


def _view_of(policy: Policy, view: PrefillView) -> PrefillView:
    """Returns the view that the policy would have alone."""
    return view._replace(
        cache=_with_fields(view.cache, policy.needs),
        q_window=view.q_window[:, view.q_window.shape[1] - policy.window :],
        window_valid=jnp.minimum(view.window_valid, policy.window),
    )


def _with_fields(cache: KVCache, fields: tuple[str, ...]) -> KVCache:
    """Returns the cache without the optional fields that are not among `fields`."""
    others = dict.fromkeys(name for name in OPTIONAL_FIELDS if name not in fields)
    return cache._replace(layers=tuple(layer._replace(**others) for layer in cache.layers))
