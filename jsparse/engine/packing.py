"""Packs a program's results into one array, since each transfer to the host costs time."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, Shaped

from jsparse.engine.setup import EngineSpec
from jsparse.engine.sizes import SamplingMode
from jsparse.models.transformer import Decoder, Weights, to_logits
from jsparse.runtime.collecting import NewTokens, PromptScores, shares
from jsparse.runtime.rows import Step
from jsparse.runtime.sampling import ChooseFn, greedy, sampled, top_logprobs
from jsparse.runtime.speculation import VerificationRound
from jsparse.shapes import Rows, Tokens

# The results of n steps for each row: the token, and the bits of its log-probability and of the
# attended and read shares; on request, also the shares of each layer, and the likeliest tokens with
# their log-probabilities.
Packed = Int32[Array, "n B w"]


# Markers past a row's last token of a round: a draft that was rejected, or followed a rejected one;
# no draft.
REJECTED, NOT_DRAFTED = -1, -2

# the tokens of a chunk whose logits are in memory at once
SCORED_AT_ONCE = 512

CHOICES: dict[SamplingMode, ChooseFn] = {"greedy": greedy, "sampled": sampled, "top": sampled}


def pack(step: Step, num_layers: int, *, layer_stats: bool, top: bool) -> Int32[Array, "B w"]:
    """Returns one step's results of all rows; the shares of a first token are 0."""
    floats = [step.logprobs]
    if step.stats is None:
        floats += [jnp.zeros_like(step.logprobs)] * (2 + 2 * num_layers * layer_stats)
    else:
        floats += step.stats.over_layers()
        if layer_stats:
            floats += [*step.stats.attended, *step.stats.read]
    columns = [step.tokens[:, None], _bits(jnp.stack(floats, axis=1))]
    if top:
        likeliest = top_logprobs(step.logits)
        columns += [likeliest.ids, _bits(likeliest.logprobs)]
    return jnp.concatenate(columns, axis=1)


def pack_round(made: VerificationRound, num_layers: int, *, layer_stats: bool, top: bool) -> Packed:
    """Returns the results of a verification round.

    Positions without a token hold REJECTED or NOT_DRAFTED.
    """
    nth = jnp.arange(len(made.tokens), dtype=jnp.int32)[:, None]
    token = jnp.where(nth <= made.drafted, REJECTED, NOT_DRAFTED)
    token = jnp.where(nth < made.counts, made.tokens, token)
    stats = made.shares

    def of_token(
        token: Rows, logprobs: Array, overflow: Array, logits: Array
    ) -> Int32[Array, "B w"]:
        step = Step(token, logprobs, stats, overflow, logits)
        return pack(step, num_layers, layer_stats=layer_stats, top=top)

    overflow = jnp.broadcast_to(made.overflow, token.shape)
    return jax.vmap(of_token)(token, made.logprobs, overflow, made.logits)


def pack_for(
    spec: EngineSpec, choice: SamplingMode, packs: Callable[..., Packed] = pack
) -> Callable[[Any], Packed]:
    """Returns the function that packs the results of a step or verification round for the host."""
    wanted = {"layer_stats": spec.layer_stats, "top": choice == "top"}
    return partial(packs, num_layers=spec.cache.num_layers, **wanted)


def unpack(steps: np.ndarray, num_layers: int, layer_stats: bool) -> NewTokens:
    """Returns the results of one row of `Packed`, [n, w], without the markers."""
    places = steps[:, 0]
    drafted = int(np.sum(places != NOT_DRAFTED)) - 1
    # copied: a view would keep the results of all rows alive as long as this sequence
    steps = np.ascontiguousarray(steps[places >= 0])
    floats = steps.view(np.float32)
    at = 4 + (2 * num_layers if layer_stats else 0)
    half = (steps.shape[1] - at) // 2
    of_layers = (len(steps), 2, num_layers)
    return NewTokens(
        steps[:, 0].tolist(),
        floats[:, 1].tolist(),
        shares(floats[:, 2:4]),
        layers=shares(floats[:, 4:at]).reshape(of_layers) if layer_stats else None,
        top=(steps[:, at : at + half], floats[:, at + half :]) if half else None,
        drafted=drafted,
    )


def pack_scores(
    decoder: Decoder, weights: Weights, before: Float[Array, "R T D"], tokens: Tokens
) -> Packed:
    """Returns the log-probabilities of a chunk's tokens.

    `before` has the hidden state before each token. Each token has the bits of its log-probability,
    its rank, and the likeliest tokens with theirs.
    """
    rows, size, width = before.shape
    block = min(SCORED_AT_ONCE, rows * size)
    padding = -rows * size % block
    hidden = jnp.pad(before.reshape(-1, width), ((0, padding), (0, 0)))
    ids = jnp.pad(tokens.ravel(), (0, padding))

    def scores(part: tuple[Array, Array]) -> Int32[Array, "n w"]:
        hidden, ids = part
        logits = to_logits(decoder, weights, hidden)
        own = jnp.take_along_axis(logits, ids[:, None], axis=1)
        rank = 1 + jnp.sum(logits > own, axis=1, dtype=jnp.int32)
        # the same numbers as those of the likeliest tokens
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, None], axis=1)
        likeliest = top_logprobs(logits)
        parts = _bits(logprobs), rank[:, None], likeliest.ids, _bits(likeliest.logprobs)
        return jnp.concatenate(parts, axis=1)

    found = jax.lax.map(scores, (hidden.reshape(-1, block, width), ids.reshape(-1, block)))
    found = found.reshape(-1, found.shape[-1])[: rows * size]
    return found.reshape(rows, size, -1).swapaxes(0, 1)


def unpack_scores(scores: np.ndarray) -> PromptScores:
    """Returns the log-probabilities of one row of a chunk, [n, w]."""
    scores = np.ascontiguousarray(scores)  # a view would keep those of all rows
    floats, top = scores.view(np.float32), scores.shape[1] // 2 + 1
    return PromptScores(floats[:, 0], scores[:, 1], scores[:, 2:top], floats[:, top:])


def _bits(x: Float32[Array, "B n"]) -> Int32[Array, "B n"]:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def joined(tree: Any) -> tuple[Shaped[Array, "..."], ...]:
    """Returns the leaves of a tree, concatenated into one array per type."""
    flat = defaultdict[Any, list[Array]](list)
    for leaf in jax.tree.leaves(tree):
        flat[leaf.dtype].append(leaf.ravel())
    return tuple(map(jnp.concatenate, flat.values()))


def parted[Tree](arrays: tuple[Shaped[Array, "..."], ...], like: Tree) -> Tree:
    """Returns the tree from which `joined` made these arrays, with the shapes of `like`."""
    leaves, structure = jax.tree.flatten(like)
    rest = dict(zip(dict.fromkeys(leaf.dtype for leaf in leaves), arrays, strict=True))
    at = dict.fromkeys(rest, 0)
    parts = []
    for leaf in leaves:
        begin, at[leaf.dtype] = at[leaf.dtype], at[leaf.dtype] + leaf.size
        parts.append(rest[leaf.dtype][begin : at[leaf.dtype]].reshape(leaf.shape))
    return jax.tree.unflatten(structure, parts)
