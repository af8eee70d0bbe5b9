"""TidalDecode makes a few layers dense; they pick the tokens for the layers after them.

Tokens that matter in one layer also matter in the next ones, so the picks of two layers serve all.

Paper: "TidalDecode: Fast and Accurate LLM Decoding with Position Persistent Sparse Attention" (Yang
et al.), arXiv:2410.05076.

Where we differ: the paper's code picks for each query head. Here the weights of a group's mean
query are used for its query heads, since dense attention can report them without a second pass over
K, and a group reads its K and V once. heads="each" picks for each KV head; with heads="all" all KV
heads attend to the tokens with the highest mean weight. Sinks and recent tokens are always picked;
`sink=0, recent=0` is the paper's.
"""

from functools import partial
from typing import Literal, NamedTuple, get_args

import jax.numpy as jnp

from jsparse.builder import builder
from jsparse.cache import CacheSpec, StepView
from jsparse.hooks import State
from jsparse.hyper_parameters import one_of, whole_number
from jsparse.pallas_kernels.threshold_select import TopK
from jsparse.policies.picks import pick
from jsparse.policy import Policy, Services
from jsparse.ranks import across
from jsparse.selection import Selection, everything
from jsparse.shapes import Queries

Heads = Literal["all", "each"]


class Settings(NamedTuple):
    """The hyper-parameters of `tidal`, and the layers that pick."""

    budget: int
    picking: tuple[int, int]
    sink: int
    recent: int
    heads: Heads


@builder
def tidal(
    budget: int = 1024,
    first: int = 2,
    again: int = 13,
    sink: int = 4,
    recent: int = 64,
    correct_every: int = 0,
    heads: Heads = "all",
) -> Policy:
    """Attends to the `budget` tokens with the highest weights in layer `first`, and later `again`.

    Args:
        budget: the number of picked tokens.
        first: the first layer that picks; it and the layers before it are dense.
        again: the dense layer that picks again, for all layers after it; a model without this layer
            picks once. The paper chooses it for each model, 13 for one of 32 layers. For
            Qwen2.5-Coder-1.5B, of 28 layers, 19 has a fortieth of 13's KL
            (docs/results/quality.md).
        sink: the number of first tokens that are always picked; they count in `budget`.
        recent: the same for the last tokens; if the two exceed the budget, the heaviest of these
            tokens fill it. The paper uses 0 and 0.
        correct_every: the number of new tokens after which K and V of the newest tokens are
            recomputed densely; 0: never. Table 2 of LycheeDecode compares with 32.
        heads: "all" picks the same tokens for all heads, by the mean weight over KV heads, which
            must hold the same number of tokens. "each" picks for each KV head, by the logits of its
            group's mean query, for the KV heads of the same index.
    """
    whole_number("budget", budget, 1)
    counts = {"first": first, "again": again, "sink": sink, "recent": recent}
    for name, value in (counts | {"correct_every": correct_every}).items():
        whole_number(name, value, 0)
    one_of("heads", heads, get_args(Heads))
    settings = Settings(budget, (first, again), sink, recent, heads)
    return Policy(
        partial(select, settings),
        init=partial(init, settings),
        update=partial(update, settings),
        stats=lambda layer: "token_logits" if layer in settings.picking else None,
        services=Services(correct_every=correct_every),
        shares="pages",
    )


def init(settings: Settings, spec: CacheSpec) -> State:
    """Returns empty picks: ids [B, K, C] and their count [B, K]; K = 1 if all heads share them."""
    heads = spec.batch, spec.num_kv_heads if settings.heads == "each" else 1
    capacity = min(settings.budget, spec.capacity)
    return jnp.zeros((*heads, capacity), jnp.int32), jnp.zeros(heads, jnp.int32)


def select(settings: Settings, state: State, layer: int, q: Queries, view: StepView):
    """Attends to the picks; to everything in the first layers and in picking layers."""
    lengths = view.layers[layer].lengths
    if layer < settings.picking[0] or layer in settings.picking:
        return everything(lengths), None, state
    ids, count = state
    ids = jnp.broadcast_to(ids, (*lengths.shape, ids.shape[-1]))
    count = jnp.broadcast_to(count, lengths.shape)
    return Selection(ids, count, granularity="token"), None, state


def update(settings: Settings, state: State, layer: int, stats, view: StepView) -> State:
    """Picks the tokens with the highest weights: each head's own, or the mean over KV heads."""
    if layer not in settings.picking:
        return state
    scores, lengths = stats.scores, view.layers[layer].lengths
    if settings.heads == "all":
        listed, lengths = scores[:, :1] > -jnp.inf, lengths[:, :1]
        weights = jnp.mean(jnp.exp(scores - stats.lse[..., None]), axis=1, keepdims=True)
        scores = jnp.where(listed, across(weights, "mean"), -jnp.inf)
    capacity = state[0].shape[-1]
    chosen = pick(
        scores,
        TopK(capacity),
        lengths,
        sink=settings.sink,
        recent=settings.recent,
        capacity=capacity,
        granularity="token",
        unit=1,
        weights="raw",
    )
    return chosen.ids, chosen.count
