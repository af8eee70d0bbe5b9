"""Records the share of blocks that a prefill method reads in every head, and replays it.

Random weights attend to no token more than to others, so that a method would read what no model
makes it read.
"""

import json
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jsparse.builder import dense
from jsparse.hooks import ChunkView, PrefillView
from jsparse.pallas_kernels.block_sparse_prefill import BLOCK
from jsparse.policies.prefill_methods import as_method
from jsparse.policy import Policy, PrefillMethod


def recorder(method: PrefillMethod) -> Policy:
    """Returns a policy with this prefill method whose state, [L, 2, N], counts blocks of keys.

    Of every layer and query head: those that were read, and those that causal attention would read.
    """
    tracing = threading.local()

    def choose(scores, view: ChunkView) -> Array:
        chosen = method.choose(scores, view) | view.own
        within = reached(view)[:, None]
        tracing.counts = jnp.stack(
            [
                jnp.sum(chosen & within, axis=(0, 2, 3)),
                jnp.sum(jnp.broadcast_to(within, chosen.shape), axis=(0, 2, 3)),
            ]
        )
        return chosen

    def init(spec) -> Int32[Array, "L 2 N"]:
        return jnp.zeros((spec.num_layers, 2, spec.num_heads), jnp.int32)

    def prefill(state: Int32[Array, "L 2 N"], layer: int, _: PrefillView) -> Array:
        counts = tracing.counts  # of the same layer, traced just before
        del tracing.counts  # a layer with a sliding window has none, and is an error
        return state.at[layer].add(counts)

    return dense()._replace(
        init=init,
        prefill=prefill,
        prefill_method=method._replace(choose=choose),
        name=f"recorder({method})",
    )


def reached(view: ChunkView) -> Array:
    """Marks the blocks of keys that begin before each block of queries ends, [B, QB, KB]."""
    last = jnp.minimum(view.starts + BLOCK, view.kv.lengths[:, :1]) - 1
    first_key = BLOCK * jnp.arange(view.num_blocks[1], dtype=jnp.int32)
    return (first_key <= last[..., None]) & (view.starts < view.kv.lengths[:, :1])[..., None]


def recorded_shares(path: Path, method: str) -> np.ndarray:
    """Returns the shares at the longest prompt of a report of bench.prompt_shares, [L, N].

    Raises:
        ValueError: the report has no such method.
    """
    rows = json.loads(path.read_text(encoding="utf-8"))["results"]
    wanted = str(as_method(method))
    rows = [row for row in rows if row["method"] == wanted]
    if not rows:
        raise ValueError(f"shares={path}: has no shares of {wanted}")
    return np.array(max(rows, key=lambda row: row["context"])["shares"])


def replayed(method: PrefillMethod, shares: Float[np.ndarray, "L N"]) -> PrefillMethod:
    """Returns `method` with blocks drawn at random at recorded shares.

    Each chunk of each layer draws a recorded layer, whose heads' shares are spread over the heads.
    The first block and a query block's own are always read. Everything in `method` is still
    computed.
    """

    def choose(scores, view: ChunkView) -> Array:
        computed = method.choose(scores, view)
        seed = jax.lax.bitcast_convert_type(jnp.sum(view.q, dtype=jnp.float32), jnp.int32)
        key = jax.random.key(seed)  # another in each layer and chunk
        of_layer, of_block = jax.random.split(key)
        ranks = (np.arange(computed.shape[1]) + 0.5) / computed.shape[1]
        by_layer = jnp.asarray(np.quantile(shares, ranks, axis=1, method="nearest").T, jnp.float32)
        share = by_layer[jax.random.randint(of_layer, (), 0, len(by_layer))]
        within = reached(view)[:, None]
        always = within & (view.own | (jnp.arange(computed.shape[-1]) == 0))
        blocks, forced = (jnp.sum(mask, -1, keepdims=True) for mask in (within, always))
        others = share[:, None, None] * blocks - forced
        rate = others / jnp.maximum(blocks - forced, 1)
        drawn = within & (jax.random.uniform(of_block, computed.shape) < rate)
        never = view.valid[:, None, None, None] < 0  # keeps the method's work in the program
        return always | drawn | (computed & never)

    return method._replace(choose=choose, name=f"replayed({method})")
