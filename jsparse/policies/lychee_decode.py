"""LycheeDecode: a few KV heads attend to everything and pick the tokens that the others attend to.

Paper: "LycheeDecode: Accelerating Long-Context LLM Inference via Hybrid-Head Sparse Decoding" (Lin et al.),
arXiv:2602.04541. A retrieval head attends to all it holds and hands what it weighs most to the head of the same index
in the next layer; a sparse head attends to the set that it was handed, and hands that on. Which head is which is
learned (`jsparse.train`).

What a group's mean query weighs stands for its query heads, as in the paper's appendix F; attention reports it from the
pass that it makes anyway, so that picking reads no K. Where we differ: sets are of pages of 16 tokens by default, since
those are read at the full speed of memory (`unit="token"` is the paper's); and the weights of the projections are not
reordered by head type, since one pool of work units over all heads of the batch needs no contiguous heads.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array

from jsparse.cache import CacheSpec, KVCache, LayerCache
from jsparse.pallas_kernels.select import Threshold, TopK, TopP
from jsparse.pallas_kernels.select import select as choose
from jsparse.partials import Stats
from jsparse.policies import head_gates
from jsparse.policy import Policy, State, below_one, builder, fraction, whole_number
from jsparse.selection import Granularity, Selection

Select = Literal["top_k", "top_p", "threshold", "ratio"]
# of each rule its parameter, what that is where none is given, and what it must be
PARAMETERS: dict[Select, tuple[str, int | float, Callable[[str, Any], None]]] = {
    "top_k": ("budget", 4096, partial(whole_number, least=1)),
    "top_p": ("p", 0.99, fraction),
    "threshold": ("threshold", 1e-3, below_one),
    "ratio": ("ratio", 0.5, below_one),
}


@builder
def lychee_decode(
    gates,
    budget: int | None = None,
    select: Select = "top_k",
    p: float | None = None,
    threshold: float | None = None,
    ratio: float | None = None,
    unit: Granularity = "page",
    correct_every: int = 0,
) -> Policy:
    """Retrieval heads are dense; sparse heads attend to what the last retrieval head of their index picked.

    Args:
        gates: the retrieval heads: a name that ships with jsparse, a file of `jsparse train-gates`, which is not read
            again in the same process, or the mask [L, K] itself. In layer 0 all must be retrieval heads.
        budget: with "top_k" only: tokens that are picked; by default 4096.
        select: how tokens are picked, by the weights of a group's mean query.
        p: with "top_p" only: the fewest tokens that weigh p are picked; by default 0.99.
        threshold: with "threshold" only: tokens that weigh more are picked, of a page its sum counts; by default 1e-3.
        ratio: with "ratio" only: the share of the context that is left out, so that what is picked grows with it; by
            default 0.5.
        unit: "page" picks whole pages by their tokens' sum, "token" single tokens.
        correct_every: after so many new tokens their K and V are computed again, densely; 0: never. The paper has 32.
    """
    for name, value, kinds in (("select", select, Select), ("unit", unit, Granularity)):
        if value not in get_args(kinds):
            raise ValueError(f"{name}={value!r}: must be one of {list(get_args(kinds))}")
    name, usual, check = PARAMETERS[select]
    given = {"budget": budget, "p": p, "threshold": threshold, "ratio": ratio}
    value = usual if given[name] is None else given[name]
    check(name, value)
    for other, unwanted in given.items():
        if other != name and unwanted is not None:
            raise ValueError(f"{other}={unwanted!r}: must not be given where select={select!r}, which has {name}")
    whole_number("correct_every", correct_every, 0)
    retrieval = head_gates.retrieval_heads(gates)
    if not retrieval[0].all():
        raise ValueError(
            f"gates={gates!r}: all heads of layer 0 must be retrieval heads, nothing is picked before them"
        )

    def size(page_size: int) -> int:
        return page_size if unit == "page" else 1

    def capacity(units: int, page_size: int) -> int:
        most = {"top_k": int(value) // size(page_size), "ratio": -int(-(1 - value) * units // 1)}.get(select, units)
        return min(max(most, 1), units)

    def rule(held: LayerCache):
        match select:
            case "top_k":
                return TopK(max(int(value) // size(held.page_size), 1))
            case "top_p":
                return TopP(value)
            case "threshold":
                return Threshold(value)
        # a whole number of units may come out a little above itself, which must not round up
        return TopK(jnp.ceil((1 - value) * (1 - 1e-6) * held.lengths / size(held.page_size)).astype(jnp.int32))

    def init(spec: CacheSpec) -> State:
        head_gates.require_fit(retrieval, gates, spec)
        heads, units = (spec.batch, spec.num_kv_heads), spec.capacity // size(spec.page_size)
        return jnp.zeros((*heads, capacity(units, spec.page_size)), jnp.int32), jnp.zeros(heads, jnp.int32)

    def attended(state: State, layer: int, q: Array, cache: KVCache):
        ids, count = state
        dense = head_gates.of_rows(retrieval[layer], len(count)) if retrieval[layer].any() else None
        return Selection(ids, count, dense=dense, granularity=unit), None, state

    def picks(layer: int) -> bool:
        """Whether a set that is picked here is used in the next."""
        return layer + 1 < len(retrieval) and bool((retrieval[layer] & ~retrieval[layer + 1]).any())

    def update(state: State, layer: int, stats: Stats | None, cache: KVCache) -> State:
        if stats is None:
            return state
        ids, count = state
        picked = choose(stats.scores[:, :, None], rule(cache.layers[layer]), capacity=ids.shape[-1], unit=unit)
        here = head_gates.of_rows(retrieval[layer], len(count))
        return jnp.where(here[..., None], picked.ids, ids), jnp.where(here, picked.count, count)

    def stats(layer: int):
        return ("page_mass" if unit == "page" else "token_logits") if picks(layer) else None

    return Policy(
        attended,
        init=init,
        update=update,
        stats=stats,
        correct_every=correct_every,
        full={"select": "top_k", "budget": 2**30, "p": None, "threshold": None, "ratio": None},
    )
