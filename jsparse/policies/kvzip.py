"""KVzip drops the tokens that the model does not need to reproduce its own prompt.

After the prompt the model is given the prompt once more, chunk by chunk, each chunk following the
whole prompt. A token's score is the greatest weight that a query of its own chunk gives it there,
in any head of the group: a token that helps to reproduce the text will help with any question about
it, so one compression serves many questions.

Paper: "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction" (Kim et al.),
arXiv:2505.23416. As in its section 3.4, weights are a softmax over the chunk in the prompt and the
repeated chunk up to the query.

Where we differ: the chunk follows the prompt without an instruction to repeat it; the softmax of a
later chunk leaves out the prompt's first tokens, which the authors' code adds; the newest `recent`
slots are kept; heads compete for the slots of their layer as in `ada_kv` (in the paper, for those
of all layers), with a limit, `cap`.

Chunks are at positions after the prompt, past the model's context if the prompt nearly fills it.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jsparse.builder import builder
from jsparse.cache import read_slots
from jsparse.hooks import RereadView, State
from jsparse.hyper_parameters import whole_number
from jsparse.policies.eviction.budgets import layer_budget
from jsparse.policies.eviction.engine import evicting
from jsparse.policies.eviction.settings import LayerView, Settings
from jsparse.policy import Policy, Reread, at_layer
from jsparse.shapes import ChunkKV, ChunkQueries, Rows

QUERIES = 128  # at a time, so that their weights take little memory


@builder
def kvzip(
    budget: int = 1024,
    sink: int = 4,
    recent: int = 32,
    chunk: int = 2048,
    floor: float = 0.2,
    cap: float = 4,
) -> Policy:
    """Keeps the slots that reproducing the prompt attends to most, the sinks, and all new tokens.

    Args:
        budget: the average number of prompt slots kept per KV head, including sinks and `recent`.
        sink: the number of first slots that are kept.
        recent: the number of newest prompt slots that are kept.
        chunk: the number of tokens that are reproduced at a time.
        floor: as in `ada_kv`; 1: all heads keep the same number.
        cap: as in `ada_kv`.
    """
    for name, value, least in (("sink", sink, 0), ("recent", recent, 0), ("chunk", chunk, 1)):
        whole_number(name, value, least)
    settings = Settings(
        greatest_weight,
        **layer_budget(budget, sink + recent, floor, cap)._asdict(),
        window=0,
        sink=sink,
        recent=recent,
        reread=Reread(chunk, score_chunk),
    )
    return evicting(settings)


def greatest_weight(view: LayerView) -> Float32[Array, "B K S"]:
    """Scores slots by the weights found while the prompt was reproduced."""
    assert view.tracked is not None
    return view.tracked


def score_chunk(state: State, layer: int, view: RereadView) -> State:
    """Stores the greatest weight of each slot of the chunk."""
    kv, tracked = view.step.layers[layer], state[layer].tracked
    at = view.start + jnp.arange(view.q.shape[1], dtype=jnp.int32)
    slots = jnp.broadcast_to(jnp.minimum(at, kv.capacity - 1), (*kv.lengths.shape, at.size))
    weights = greatest_weights(view.q, read_slots(kv.k, kv, slots), view.k, view.valid)
    tracked = tracked.at[:, :, at].set(weights, mode="drop")
    return at_layer(state, layer, state[layer]._replace(tracked=tracked))


def greatest_weights(
    q: ChunkQueries, first: Float[Array, "B K T H"], again: ChunkKV, valid: Rows
) -> Float32[Array, "B K T"]:
    """Returns the greatest weight that any query gives each token of its chunk in the prompt.

    Args:
        q: the queries of the repeated chunk, of which the first `valid[b]` are real.
        first: the chunk's keys in the prompt.
        again: the keys of the repeated chunk.
        valid: the number of tokens of the chunk, per row.
    """
    batch, tokens, _, head_dim = q.shape
    kv_heads, size = first.shape[1], min(QUERIES, tokens)
    grouped = q.reshape(batch, tokens, kv_heads, -1, head_dim)
    grouped = jnp.pad(grouped, ((0, 0), (0, -tokens % size), (0, 0), (0, 0), (0, 0)))
    blocks = grouped.reshape(batch, -1, size, *grouped.shape[2:]).swapaxes(0, 1)
    nth = jnp.arange(tokens, dtype=jnp.int32)
    inside = (nth < valid[:, None])[:, None, None, None]
    product = partial(
        jnp.einsum,
        precision=jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )

    def of_block(best: Array, block: tuple[Array, Array]) -> tuple[Array, None]:
        queries, start = block
        own = (start + jnp.arange(size, dtype=jnp.int32))[:, None]
        earlier = product("bqkgh,bkth->bkgqt", queries, first) / head_dim**0.5
        repeated = product("bqkgh,btkh->bkgqt", queries, again) / head_dim**0.5
        earlier = jnp.where(inside, earlier, -jnp.inf)
        repeated = jnp.where(nth <= own, repeated, -jnp.inf)
        lse = jnp.logaddexp(*(jax.nn.logsumexp(x, axis=-1) for x in (earlier, repeated)))
        real = own[:, 0] < valid[:, None, None, None]
        logits = jnp.where(real[..., None], earlier - lse[..., None], -jnp.inf)
        return jnp.maximum(best, jnp.max(logits, axis=(2, 3))), None

    none = jnp.full((batch, kv_heads, tokens), -jnp.inf, jnp.float32)
    starts = jnp.arange(len(blocks), dtype=jnp.int32) * size
    return jnp.exp(jax.lax.scan(of_block, none, (blocks, starts))[0])
