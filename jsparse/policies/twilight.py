"""Twilight prunes a base policy's selection by top-p over estimated attention weights.

The base selects generously, a 4-bit copy of K estimates the weights of its selection, and top-p
keeps the fewest tokens with a share p of the estimated mass. So the number of tokens of each head
follows its need at each step. The query heads of a group keep separate sets; their KV head reads
the union.

Paper: "Twilight: Adaptive Attention Sparsity with Hierarchical Top-p Pruning" (Lin et al.),
arXiv:2502.02770. It leaves the first two layers dense: dense_layers(twilight(…), n=2).

Where we differ: the copy of K is stored in the frame of the model's key constants; without the
frame, constant channels, such as those of Qwen2, use up its 4 bits. By default whole pages are kept
(`prune`), since attention reads whole pages. The mass is that of the base's list: the newest token,
which is always attended to, counts only if it is listed.
"""

from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple, get_args

import jax.numpy as jnp

from jsparse.builder import builder, require_policy, require_stays
from jsparse.cache import LayerCache, StepView, read_pages
from jsparse.cache.key_constants import KEY_CONSTANTS, frame_at
from jsparse.hyper_parameters import fraction, one_of
from jsparse.pallas_kernels import int4_keys
from jsparse.pallas_kernels.int4_append import int4_append
from jsparse.pallas_kernels.int4_keys import Int4Keys
from jsparse.pallas_kernels.int4_scores import int4_scores
from jsparse.pallas_kernels.threshold_select import TopP, threshold_select
from jsparse.policies.break_evens import BREAK_EVENS, break_evens
from jsparse.policies.combinators import WrappedState, with_state
from jsparse.policies.sidecars import framed_sidecar
from jsparse.policy import Policy, knob, without_knob
from jsparse.selection import Selection, paged
from jsparse.shapes import Bits, Ids, Queries

Prune = Literal["page_mass", "token"]


class Settings(NamedTuple):
    """The hyper-parameters of `twilight`."""

    base: Policy
    p: float
    prune: Prune
    dense_below: int | Literal["auto"]


@builder
def twilight(
    base: Policy,
    p: float = 0.95,
    prune: Prune = "page_mass",
    dense_below: int | Literal["auto"] = 0,
) -> Policy:
    """Attends to the smallest part of `base`'s selection with `p` of its estimated attention mass.

    Heads that `base` makes dense stay dense.

    Args:
        base: the base policy.
        p: the share of the estimated mass that every query head keeps.
        prune: "page_mass" keeps the fewest whole pages with a share p; "token" keeps the fewest
            tokens, read one by one.
        dense_below: the number of tokens below which a row is dense; if all rows are, nothing is
            selected. "auto" is the context at which dense attention was measured to be as fast, on
            this GPU or else on an H200, by the bytes of K and V of the whole batch.

    The base must not list tokens if pages have more than 32, since such pages have no bits. Over a
    base that learns from the attended tokens, such as `lfps`, `prune` must be "token": lists of
    pages report no logits.
    """
    require_policy("base", base)
    fraction("p", p)
    one_of("prune", prune, get_args(Prune))
    if dense_below != "auto" and (type(dense_below) is not int or dense_below < 0):
        raise ValueError(f"dense_below={dense_below!r}: must be 'auto' or an integer of at least 0")
    require_stays("base", base, "since twilight chooses by their 4-bit copies")
    if prune != "token" and base.stats(0) == "listed_logits":
        raise ValueError(
            f"prune={prune!r}: must be 'token' over {base}, which learns from attended tokens"
        )
    settings = Settings(base, p, prune, dense_below)
    keys = framed_sidecar(int4_keys.init, int4_append)
    pruning = partial(select, settings)
    kept = with_state(base, **keys._asdict(), select=pruning, shares="pages", needs=KEY_CONSTANTS)
    return kept._replace(
        dense_below=base.dense_below if dense_below == 0 else partial(shortest, settings),
        per_row={**base.per_row, "p": fraction},  # a row's p is Twilight's, never the base's
    )


def select(settings: Settings, state: WrappedState, layer: int, q: Queries, view: StepView):
    """Prunes the base's selection."""
    chosen, summary, of_base = settings.base.select(state.base, layer, q, without_knob(view, "p"))
    if summary is not None:
        raise ValueError(f"base={settings.base}: must not summarise tokens that it does not select")
    if chosen.ids.shape[-1] > 0:
        chosen = pruned(settings, chosen, state.own[layer], layer, q, view)
    return chosen, None, state._replace(base=of_base)


def pruned(
    settings: Settings, chosen: Selection, copy: Int4Keys, layer: int, q: Queries, view: StepView
) -> Selection:
    """Keeps the smallest part of a selection with p of its estimated mass in each query head."""
    kv, frame, prune = view.layers[layer], frame_at(view, layer), settings.prune
    mass = knob(view, "p", settings.p)
    pages = paged(chosen, num_pages=kv.num_pages, page_size=kv.page_size)
    logits = int4_scores(q, kv, copy, pages, frame=frame)
    logits = logits.reshape(*kv.lengths.shape, -1, pages.ids.shape[-1] * kv.page_size)
    if kv.bias is not None:
        logits += read_pages(kv.bias, kv, pages.ids).reshape(*kv.lengths.shape, 1, -1)
    size = None if prune == "token" else kv.page_size
    # whole pages keep the base's bits
    bits = pages.bits if prune == "page_mass" else None
    kept = threshold_select(
        logits,
        TopP(mass),
        capacity=logits.shape[-1] // (size or 1),
        granularity=prune,
        page_size=size,
        names=pages.ids if bits is None else None,
    )
    if bits is not None:
        kept = within(kept, pages.ids, bits)
    return replace(kept, dense=pages.dense)


def within(kept: Selection, ids: Ids, bits: Bits) -> Selection:
    """Replaces the ids of `kept`, indices into `ids` and `bits`, by those pages and bits."""
    valid = jnp.arange(kept.ids.shape[-1]) < kept.count[..., None]
    ids, bits = (jnp.where(valid, jnp.take_along_axis(x, kept.ids, 2), 0) for x in (ids, bits))
    return replace(kept, ids=ids, bits=bits)


def shortest(settings: Settings, kv: LayerCache) -> int:
    """Returns the number of tokens below which a row is dense."""
    own = break_even(kv) if settings.dense_below == "auto" else settings.dense_below
    return max(own, settings.base.dense_below(kv))


def break_even(kv: LayerCache) -> int:
    """Returns the tokens per row at which dense attention is as fast as Twilight on this device.

    All rows are assumed to have the same length.
    """
    nbytes = (break_evens() or BREAK_EVENS["NVIDIA H200"]).over_quest
    return int(nbytes // (kv.lengths.size * kv.slot_bytes))
