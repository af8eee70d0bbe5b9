"""Decodes a batch of rows: the programs that run their steps, and the services between steps.

The rows of a session start together and have separate pages. Those of an engine join and leave
while others decode, over shared pages. Both are a `Batch`, and the same step decodes it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float32, Int32

from jsparse.cache import (
    NOTHING,
    CacheSpec,
    KVCache,
    ReadOnly,
    level,
    once,
    step_view,
    without_borrowed,
)
from jsparse.hooks import State
from jsparse.models.transformer import Decoder, Weights
from jsparse.policy import Policy, ServiceKind, maintained
from jsparse.runtime.compilation import inlined, note_trace, program
from jsparse.runtime.correct import correct
from jsparse.runtime.decode_step import StepStats, decode_step
from jsparse.runtime.sampling import ChooseFn
from jsparse.runtime.shared_pages import SharedPages
from jsparse.runtime.spread_programs import REPLICATED, SHARDED, by_rank
from jsparse.runtime.state_axes import put_rows, take_rows
from jsparse.shapes import Rows


class Batch[Memory: (KVCache, SharedPages)](NamedTuple):
    """B rows that decode together; programs donate and return it.

    Attributes:
        tokens: the newest token of each row, whose K and V are not yet in the cache.
        cache: K and V: a session's KVCache, or the SharedPages of an engine's rows. A step reads
            the KVCache that `of_rows(active)` returns, and `after` stores the result.
        state: the policy's state.
        given: the carry of `choose`.
        made: the number of tokens chosen so far: one for all rows, or one per row.
        recent: the newest tokens in the cache, n = the number that a correction recomputes.
        knobs: the hyper-parameters that rows have set, by name: one number per row.
    """

    tokens: Rows
    cache: Memory
    state: State
    given: Any
    made: Int32[Array, "*B"]
    recent: Int32[Array, "B n"]
    knobs: dict[str, Array] | None = None


def no_recent(policy: Policy, rows: int) -> Int32[Array, "B n"]:
    """Returns an empty `recent` buffer, [B, max(correct_every, 1)].

    XLA cannot shard an empty array over devices.
    """
    return jnp.zeros((rows, max(policy.services.correct_every, 1)), jnp.int32)


class Step(NamedTuple):
    """The results of a decode step, by row.

    Attributes:
        tokens, logprobs: the chosen tokens and their log-probabilities under the model's softmax.
        stats: the shares attended and read in each layer; None for the first token.
        overflow: the rows that had run out of room; their tokens are invalid from then on.
        logits: the logits that the tokens were chosen from.
    """

    tokens: Rows
    logprobs: Float32[Array, "B"]
    stats: StepStats | None
    overflow: Bool[Array, "B"]
    logits: Float32[Array, "B V"]


def one_step[Memory: (KVCache, SharedPages)](
    decoder: Decoder,
    policy: Policy,
    choose: ChooseFn,
    keep: Callable[[Step], Any],
    weights: Weights,
    read_only: ReadOnly,
    batch: Batch[Memory],
    active: Bool[Array, "B"] | None,
) -> tuple[Batch[Memory], Any]:
    """Runs one decode step, which chooses the next tokens; also returns the result of `keep`.

    Inactive rows do not change; None: all rows are active.
    """
    seen, read_only = batch.cache.of_rows(active), read_only._replace(knobs=batch.knobs or None)
    logits, cache, state, stats = decode_step(
        decoder, policy, weights, batch.tokens, seen, batch.state, read_only, active
    )
    tokens, logprobs, given = choose(batch.given, batch.made, logits, active)
    recent = jnp.concatenate([batch.recent, batch.tokens[:, None]], axis=1)[:, 1:]
    result = keep(Step(tokens, logprobs, stats, cache.overflow, logits))
    made = batch.made + (1 if active is None else active)
    if active is not None:
        tokens = jnp.where(active, tokens, batch.tokens)
        recent = jnp.where(active[:, None], recent, batch.recent)
    memory = batch.cache.after(cache, active)
    return Batch(tokens, memory, state, given, made, recent, batch.knobs), result


@program(
    static_argnames=("decoder", "policy", "choose", "count", "keep"),
    donate_argnames=("batch",),
    sharded=("weights", "batch"),
    out=(SHARDED, REPLICATED),
)
def decode_steps[Memory: (KVCache, SharedPages)](
    decoder: Decoder,
    policy: Policy,
    choose: ChooseFn,
    count: int,
    keep: Callable[[Step], Any],
    weights: Weights,
    read_only: ReadOnly,
    batch: Batch[Memory],
    counts: Int32[Array, "B"] | None = None,
) -> tuple[Batch[Memory], Any]:
    """Runs `count` decode steps; also returns the results of `keep`, stacked.

    Row b takes part in the first `counts[b]` steps; steps without any row are skipped. None: all
    rows take part in all steps.
    """
    note_trace()
    step = partial(one_step, decoder, policy, choose, keep, weights, read_only)
    if count == 1:
        batch, result = step(batch, None if counts is None else counts > 0)
        return batch, jax.tree.map(lambda x: x[None], result)
    if policy.evicts or not isinstance(batch.cache, KVCache):
        return looped(step, count, batch, counts)

    def lean(batch: Batch[Any], active: Bool[Array, "B"] | None) -> tuple[Batch[Any], Any]:
        batch, result = step(batch, active)
        return _of_cache(once, batch), result

    batch, results = looped(lean, count, _of_cache(once, batch), counts)
    return _of_cache(level, batch), results


def _of_cache(change: Callable[[KVCache], KVCache], batch: Batch[Any]) -> Batch[Any]:
    return batch._replace(cache=change(batch.cache))


def looped[Carry](
    step: Callable[..., Any], count: int, carry: Carry, counts: Int32[Array, "B"] | None
) -> tuple[Carry, Any]:
    """Runs up to `count` steps of a batch in a loop; also returns their results, stacked.

    `step` takes the carry and the active rows: row b takes part in the first `counts[b]` steps.
    Steps without any row are skipped; None: all rows take part in all steps.
    """
    if counts is None:
        return jax.lax.scan(step, carry, length=count)
    # traced once, although its results' shapes are evaluated first
    step = jax.jit(step, inline=True)

    def nth_step(nth: Array, so_far: tuple[Carry, Any]) -> tuple[Carry, Any]:
        carry, result = step(so_far[0], nth < counts)
        stacked = jax.tree.map(lambda all, one: all.at[nth].set(one), so_far[1], result)
        return carry, stacked

    shapes = jax.eval_shape(step, carry, counts > 0)[1]
    empty = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), shapes)
    if not count:
        return carry, empty
    # with a constant trip count, XLA would launch every step from the host
    trips = jnp.minimum(jnp.max(counts), count)
    return jax.lax.fori_loop(0, trips, nth_step, (carry, empty))


@program(
    static_argnames=("choose", "keep"),
    donate_argnames=("given",),
    sharded=("overflow",),
    out=REPLICATED,
)
def first_tokens(
    choose: ChooseFn,
    keep: Callable[[Step], Any],
    given: Any,
    logits: Float32[Array, "B V"],
    overflow: Bool[Array, "B"],
) -> tuple[Rows, Any, Any]:
    """Chooses the tokens that follow the prompts; also returns the carry and `keep`'s result."""
    tokens, logprobs, given = choose(given, jnp.int32(0), logits, None)
    result = keep(Step(tokens, logprobs, None, overflow, logits))
    return tokens, given, jax.tree.map(lambda x: x[None], result)


@program(static_argnames=("policy",), donate_argnames=("cache", "state"))
def maintain(
    policy: Policy, cache: KVCache, state: State, read_only: ReadOnly = NOTHING
) -> tuple[KVCache, State]:
    """Runs the policy's maintenance on a cache of rows that are all due."""
    note_trace()
    state, cache = maintained(policy, policy.services.maintain(state, step_view(cache, read_only)))
    return without_borrowed(cache), state


def serviced[Memory: (KVCache, SharedPages)](
    service: ServiceKind,
    decoder: Decoder,
    policy: Policy,
    weights: Weights,
    read_only: ReadOnly,
    batch: Batch[Memory],
    *,
    within: bool = False,
) -> Batch[Memory]:
    """Runs one of the policy's services on a batch of rows that are all due, and returns the batch.

    With `within`, it becomes part of the calling program.
    """
    cache, state = batch.cache.of_rows(None), batch.state
    read_only = read_only._replace(knobs=batch.knobs or None)
    if service == "correct":
        run = inlined(correct) if within else correct
        cache, state = run(decoder, policy, weights, batch.recent, cache, state, read_only)
    else:
        run = inlined(maintain) if within else maintain
        # with K and V in host memory it reads only newest tokens, which are on the device
        cache, state = run(policy, cache, state, read_only._replace(host=None))
    return batch._replace(cache=batch.cache.after(cache, None), state=state)


def services_on(mesh: Mesh | None) -> Callable[..., Any]:
    """Returns `serviced`, as one program if the model is spread over these devices."""
    if mesh is None:
        return serviced
    static = ("service", "decoder", "policy", "within")
    run = by_rank(serviced, mesh, sharded=("weights", "batch"), static=static, donated=("batch",))
    return partial(run, within=True)


def take[Memory: (KVCache, SharedPages)](
    policy: Policy, spec: CacheSpec, batch: Batch[Memory], rows: Int32[Array, "n"]
) -> Batch[Memory]:
    """Returns some rows as a separate batch over the same pages.

    Indices ≥ B are padding: they read the last row, and `put` drops them. `made` and all arrays of
    `given` must have rows as their first axis.

    Raises:
        ValueError: the cache has no block table.
    """
    cache, state = take_rows(policy, spec, batch.cache, batch.state, rows)
    of_rows = jax.tree.map(lambda x: x[rows], batch._replace(cache=(), state=()))
    return of_rows._replace(cache=cache, state=state)


def put[Memory: (KVCache, SharedPages)](
    policy: Policy,
    spec: CacheSpec,
    batch: Batch[Memory],
    part: Batch[Memory],
    rows: Int32[Array, "n"],
) -> Batch[Memory]:
    """Returns the batch with the rows of `part` at these indices, and the pages of `part`.

    `made` and all arrays of `given` must have rows as their first axis.

    Raises:
        ValueError: the cache has no block table.
    """
    both = part.cache, part.state
    cache, state = put_rows(policy, spec, batch.cache, batch.state, both, rows)
    others = (each._replace(cache=(), state=()) for each in (batch, part))
    placed = jax.tree.map(lambda x, new: x.at[rows].set(new), *others)
    return placed._replace(cache=cache, state=state)
