"""Verified attends to the pages that dense attention weighed most when it last looked.

Where dense attention checks what a policy drafts (`exact=True`), it reads all of K anyway, and its
weights tell what matters around here. Steps then choose nothing. Until the first check the queries
at the prompt's end have chosen.

The method is our own. Drafting with a part of the cache is MagicDec's (Chen et al.,
arXiv:2408.11049), and retrieving that part once for several drafts TriForce's (Sun et al.,
arXiv:2404.11912).
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jsparse.builder import builder
from jsparse.cache import CacheSpec, StepView
from jsparse.hooks import PrefillView, State
from jsparse.hyper_parameters import whole_number
from jsparse.pallas_kernels.block_sparse_decode import block_sparse_decode
from jsparse.pallas_kernels.threshold_select import TopK, threshold_select
from jsparse.policy import Policy, Services, at_layer
from jsparse.selection import Selection, everything
from jsparse.shapes import Lengths, Queries

# the prompt's last queries, whose mean chooses until the first check
WINDOW = 8


class Settings(NamedTuple):
    """Holds the hyper-parameters, those of `verified`."""

    budget: int
    recent: int

    def pages(self, size: int) -> tuple[int, int]:
        """Returns the numbers of pages that dense attention chooses, and of the newest.

        The newest page may have but one token.
        """
        total = max(self.budget // size, 2)
        newest = min(-(-(self.recent - 1) // size) + 1, total - 1)
        return total - newest, newest


class Chosen(NamedTuple):
    """Holds what dense attention chose in a layer.

    Attributes:
        ids: the chosen pages, the first `number` of each head, ascending.
        number: how many they are.
        end: the page that follows those among which it chose; all from there on are new.
    """

    ids: Int32[Array, "B K C"]
    number: Lengths
    end: Lengths


@builder
def verified(budget: int = 1024, recent: int = 64) -> Policy:
    """Attends to `budget` tokens, in the newest pages and those that dense attention weighed most.

    It is made to draft where dense attention checks it (`exact=True`), which is when it chooses
    anew. Without, it goes on with what the prompt's last queries attended to.

    Args:
        budget: the number of tokens that a KV head attends to, in whole pages: two at least.
        recent: how many of them are the newest, at least, unless all but one page of the budget
            hold fewer.
    """
    whole_number("budget", budget, 1)
    whole_number("recent", recent, 1)
    if budget <= recent:
        raise ValueError(f"budget={budget}: must be more than recent={recent}")
    settings = Settings(budget, recent)
    return Policy(
        partial(select, settings),
        init=partial(init, settings),
        prefill=partial(prefill, settings),
        services=Services(checked=partial(choose, settings)),
        window=WINDOW,
        shares="pages",
        reads=0,
    )


def init(settings: Settings, spec: CacheSpec) -> State:
    """Returns the choice of no page, one per layer."""
    heads = spec.batch, spec.num_kv_heads
    none = jnp.zeros(heads, jnp.int32)
    capacity = min(settings.pages(spec.page_size)[0], spec.capacity // spec.page_size)
    ids = jnp.zeros((*heads, capacity), jnp.int32)
    return tuple(Chosen(ids, none, none) for _ in range(spec.num_layers))


def prefill(settings: Settings, state: State, layer: int, view: PrefillView) -> State:
    """Chooses the pages that the mean of the prompt's last queries weighs most."""
    if not view.last:
        return state
    kv, count = view.step.layers[layer], jnp.maximum(view.window_valid, 1)
    query = jnp.sum(view.q_window.astype(jnp.float32), axis=1) / count[:, None, None]
    q = query.astype(view.q_window.dtype)
    out = block_sparse_decode(q, kv, everything(kv.lengths), stats="page_mass")
    return choose(settings, state, layer, out.stats, view.step)


def choose(settings: Settings, state: State, layer: int, stats, view: StepView) -> State:
    """Chooses the pages of greatest mass; the newest are taken anyway."""
    kv, scores = view.layers[layer], stats.scores
    read = jnp.sum(scores > -jnp.inf, axis=-1, dtype=jnp.int32)
    end = jnp.maximum(read - settings.pages(kv.page_size)[1], 0)
    older = jnp.arange(scores.shape[-1], dtype=jnp.int32) < end[..., None]
    capacity = state[layer].ids.shape[-1]
    chosen = threshold_select(
        jnp.where(older, scores, -jnp.inf)[:, :, None],
        TopK(capacity),
        capacity=capacity,
        granularity="page",
        weights="raw",
    )
    return at_layer(state, layer, Chosen(chosen.ids, chosen.count, end))


def select(settings: Settings, state: State, layer: int, q: Queries, view: StepView):
    """Lists what was chosen, and behind it the newest pages, as many as there is room for."""
    kv, (ids, count, end) = view.layers[layer], state[layer]
    total = min(ids.shape[-1] + settings.pages(kv.page_size)[1], kv.num_pages)
    behind = (kv.lengths - 1) // kv.page_size + 1  # the page that is not begun
    recent = jnp.maximum(jnp.minimum(behind - end, total - count), 0)
    nth = jnp.arange(total, dtype=jnp.int32)
    chosen = jnp.pad(ids, ((0, 0), (0, 0), (0, total - ids.shape[-1])))
    ids = jnp.where(nth < count[..., None], chosen, (behind - recent - count)[..., None] + nth)
    count = count + recent
    return Selection(jnp.where(nth < count[..., None], ids, 0), count), None, state
