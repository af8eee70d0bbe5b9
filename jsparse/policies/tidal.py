"""TidalDecode lets some layers attend to everything and pick tokens for the layers behind them.

Tokens that matter in one layer matter in the next ones too, so two layers' picks serve all.

Paper: "TidalDecode: Fast and Accurate LLM Decoding with Position Persistent Sparse Attention" (Yang
et al.), arXiv:2410.05076.

Where we differ: the weights of a group's mean query stand for its query heads, since dense
attention can report them without a second pass over K. The weights of all KV heads are averaged, so
that every head attends to the same tokens. Sinks and recent text are always among them; `sink=0,
recent=0` is the paper's.
"""

import jax.numpy as jnp

from jsparse.builder import builder
from jsparse.cache import StepView
from jsparse.hyper_parameters import whole_number
from jsparse.pallas_kernels.threshold_select import TopK
from jsparse.policies.picks import pick
from jsparse.policy import Policy, Services, State
from jsparse.selection import Selection, everything


@builder
def tidal(
    budget: int = 1024,
    first: int = 2,
    again: int = 13,
    sink: int = 4,
    recent: int = 64,
    correct_every: int = 0,
) -> Policy:
    """Attend to the `budget` tokens that layer `first`, and later `again`, weighs most.

    All heads of a row must hold the same number of tokens.

    Args:
        budget: the number of tokens that are picked.
        first: the first layer that picks; it and the layers before it are dense.
        again: the layer that is dense and picks anew, for all layers behind it; a model without it
            picks once. The paper chooses it for each model, and 13 for one of 32 layers
            (`bench.layer_overlap` shows how, by weight instead of by needles).
        sink: the number of first tokens that are among the `budget`, whatever they weigh.
        recent: the same of the last tokens; where both are more than the budget, the heaviest of
            them take all of it. 0 and 0 are the paper's.
        correct_every: the number of new tokens after which K and V of the newest tokens are
            recomputed densely; 0 is never. Table 2 of LycheeDecode compares with 32.
    """
    whole_number("budget", budget, 1)
    counts = {"first": first, "again": again, "sink": sink, "recent": recent}
    for name, value in (counts | {"correct_every": correct_every}).items():
        whole_number(name, value, 0)

    def picks(layer: int) -> bool:
        return layer in (first, again)

    def init(spec):
        capacity = min(budget, spec.capacity)
        return jnp.zeros((spec.batch, capacity), jnp.int32), jnp.zeros(spec.batch, jnp.int32)

    def select(state: State, layer: int, q, view: StepView):
        lengths = view.layers[layer].lengths
        if layer < first or picks(layer):
            return everything(lengths), None, state
        ids, count = state
        ids = jnp.broadcast_to(ids[:, None], (*lengths.shape, ids.shape[-1]))
        return (
            Selection(ids, jnp.broadcast_to(count[:, None], lengths.shape), granularity="token"),
            None,
            state,
        )

    def update(state: State, layer: int, stats, view: StepView):
        if not picks(layer):
            return state
        weights = jnp.mean(jnp.exp(stats.scores - stats.lse[..., None]), axis=1, keepdims=True)
        held = stats.scores[:, :1] > -jnp.inf
        capacity = state[0].shape[-1]
        chosen = pick(
            jnp.where(held, weights, -jnp.inf),
            TopK(capacity),
            view.layers[layer].lengths[:, :1],
            sink=sink,
            recent=recent,
            capacity=capacity,
            granularity="token",
            unit=1,
            weights="raw",
        )
        return chosen.ids[:, 0], chosen.count[:, 0]

    def stats(layer: int):
        return "token_logits" if picks(layer) else None

    return Policy(
        select,
        init=init,
        update=update,
        stats=stats,
        services=Services(correct_every=correct_every),
        shares="pages",
    )
