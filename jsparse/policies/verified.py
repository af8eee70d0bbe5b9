"""Verified attends to the pages with the highest weights under dense attention.

With `exact=True`, verification reads all of K anyway, and its weights show which pages matter at
this point of the text. Decode steps then select nothing. Until the first verification round, the
queries at the prompt's end choose the pages.

The method is our own. Drafting with a part of the cache is MagicDec's idea (Chen et al.,
arXiv:2408.11049), and retrieving that part once for several drafts is TriForce's (Sun et al.,
arXiv:2404.11912).
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jsparse.builder import builder
from jsparse.cache import CacheSpec, StepView
from jsparse.hooks import PrefillView, State
from jsparse.hyper_parameters import whole_number
from jsparse.pallas_kernels.block_sparse_decode import block_sparse_decode
from jsparse.pallas_kernels.threshold_select import TopK, threshold_select
from jsparse.policy import Policy, Services
from jsparse.selection import Selection, everything
from jsparse.selection.partials import Stats
from jsparse.shapes import Queries

# the number of last prompt queries; their mean chooses until the first verification round
WINDOW = 8


class Settings(NamedTuple):
    """The hyper-parameters of `verified`."""

    budget: int
    recent: int

    def pages(self, size: int) -> tuple[int, int]:
        """Returns the number of pages that dense attention chooses, and of newest pages.

        The newest page may have only one token.
        """
        total = max(self.budget // size, 2)
        newest = min(-(-(self.recent - 1) // size) + 1, total - 1)
        return total - newest, newest


class Chosen(NamedTuple):
    """The pages chosen by dense attention in each layer.

    Attributes:
        ids: the chosen pages, the first `number` of each head, ascending.
        number: the number of chosen pages.
        end: the end of the pages that it chose among; all pages from there on are new.
    """

    ids: Int32[Array, "L B K C"]
    number: Int32[Array, "L B K"]
    end: Int32[Array, "L B K"]


@builder
def verified(budget: int = 1024, recent: int = 64) -> Policy:
    """Attends to `budget` tokens, in the newest pages and in those with the highest dense weights.

    It is made to draft for `exact=True`: each verification round then chooses new pages. Otherwise
    it keeps the pages that the prompt's last queries chose.

    Args:
        budget: the number of tokens that a KV head attends to, in whole pages: at least two.
        recent: the minimum number of newest tokens among them, limited to all but one page of the
            budget.
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
    """Returns a state without chosen pages."""
    none = jnp.zeros((spec.num_layers, spec.batch, spec.num_kv_heads), jnp.int32)
    capacity = min(settings.pages(spec.page_size)[0], spec.capacity // spec.page_size)
    return Chosen(jnp.zeros((*none.shape, capacity), jnp.int32), none, none)


def prefill(settings: Settings, state: State, layer: int, view: PrefillView) -> State:
    """Chooses the pages with the highest weights for the mean of the prompt's last queries."""
    if not view.last:
        return state
    kv, count = view.step.layers[layer], jnp.maximum(view.window_valid, 1)
    query = jnp.sum(view.q_window.astype(jnp.float32), axis=1) / count[:, None, None]
    q = query.astype(view.q_window.dtype)
    out = block_sparse_decode(q, kv, everything(kv.lengths), stats="page_mass")
    assert isinstance(out.stats, Stats)
    new = heaviest(settings, out.stats.scores, kv.page_size, state.ids.shape[-1])
    return jax.tree.map(lambda all, own: all.at[layer].set(own), state, new)


def choose(settings: Settings, state: State, stats: Sequence[Stats], view: StepView) -> State:
    """Chooses pages for all layers at once."""
    scores = jnp.concatenate([of_layer.scores for of_layer in stats])
    new = heaviest(settings, scores, view.layers[0].page_size, state.ids.shape[-1])
    return jax.tree.map(lambda all, old: all.reshape(old.shape), new, state)


def heaviest(
    settings: Settings, scores: Float32[Array, "rows K M"], page_size: int, capacity: int
) -> Chosen:
    """Chooses the pages with the highest mass; the newest are attended to anyway."""
    read = jnp.sum(scores > -jnp.inf, axis=-1, dtype=jnp.int32)
    end = jnp.maximum(read - settings.pages(page_size)[1], 0)
    older = jnp.arange(scores.shape[-1], dtype=jnp.int32) < end[..., None]
    chosen = threshold_select(
        jnp.where(older, scores, -jnp.inf)[:, :, None],
        TopK(capacity),
        capacity=capacity,
        granularity="page",
        weights="raw",
    )
    return Chosen(chosen.ids, chosen.count, end)


def select(settings: Settings, state: State, layer: int, q: Queries, view: StepView):
    """Lists the chosen pages and then the newest pages, up to the budget."""
    kv, (ids, count, end) = view.layers[layer], (own[layer] for own in state)
    total = min(ids.shape[-1] + settings.pages(kv.page_size)[1], kv.num_pages)
    next_page = (kv.lengths - 1) // kv.page_size + 1  # the page after the newest one
    recent = jnp.maximum(jnp.minimum(next_page - end, total - count), 0)
    nth = jnp.arange(total, dtype=jnp.int32)
    chosen = jnp.pad(ids, ((0, 0), (0, 0), (0, total - ids.shape[-1])))
    ids = jnp.where(nth < count[..., None], chosen, (next_page - recent - count)[..., None] + nth)
    count = count + recent
    return Selection(jnp.where(nth < count[..., None], ids, 0), count), None, state
