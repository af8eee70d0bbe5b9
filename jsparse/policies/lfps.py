"""LFPS predicts from past attention which tokens a step will attend to, before its query exists.

Attention often returns to the same position (a vertical line in its map) or to the same distance (a
slash). Each KV head has two tables: Φ(i) over positions, and Ψ(Δ) over distances Δ = t - i from the
newest token t. Tokens with a large Φ or Ψ are candidates; no key is read to find them.

Paper: "Learn from the Past: Fast Sparse Indexing for Large Language Model Decoding" (Yao and Wang),
arXiv:2506.15704.

Where we differ:
- The slash table is indexed by distance, so nothing moves from step to step; the paper indexes it
  by position and moves it. Ours points at the same distance from the next token. Taken literally,
  equations 4, 7 and 10 read the paper's table before it has moved, one position too far back
  (`aligned=False`).
- Tables are per KV head, with the maximum of the group's softmaxes as the weight w.
- Attended tokens do not lose half of their mean weight, which would remove tokens that get a little
  attention at every step (`penalty=0.5` is the paper's).
- By default heads attend to all candidates, and their number is the budget, so no key is read to
  choose among more (`exact=True` is the paper's, which sets no limit where ours is `wider`).
- By default candidates are the best of max(Φ, Ψ), not those above a threshold from the tables'
  kurtosis (`candidates="threshold"` is the paper's, `floor` is ours).
- The budget includes the sinks. Tables are bfloat16.
- No head bypasses by default. With `bypass=True` a KV head bypasses if all query heads of its group
  do, and its tables decay, while the paper leaves them unchanged.
"""

import math
from functools import partial
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32

from jsparse.builder import builder
from jsparse.cache import (
    CacheSpec,
    KVCache,
    LayerCache,
    StepView,
    one_head,
    physical_pages,
    read_heads,
)
from jsparse.hooks import PrefillView
from jsparse.hyper_parameters import below_one, flag, fraction, number_in, one_of, whole_number
from jsparse.pallas_kernels.table_candidates import Best, table_candidates
from jsparse.pallas_kernels.table_update import table_update
from jsparse.policies.lfps_variants import (
    SINKS,
    Bypass,
    Candidates,
    ExactSettings,
    PromptSummary,
    bypassing,
    chosen_exactly,
    described,
    no_prompt,
    scaled_products,
)
from jsparse.policy import Policy, Services, at_layer, knob
from jsparse.selection.partials import ListedLogits, Stats, group_weights, softmax_partial
from jsparse.shapes import Lengths, Queries, Rows

WINDOW = 32  # s, the number of last prompt queries that build the tables
# growth of the tables between two renormalisations; a single step may exceed it
MAX_SCALE = 2.0**12
FAINT = 2.0**-20  # tables without a larger entry are not scaled down


class Settings(NamedTuple):
    """The hyper-parameters.

    Attributes:
        budget, decay, penalty: those of `lfps`.
        late: the offset of distances in Ψ: 0, or 1 if not aligned.
        exact: the candidates among which exact weights choose; None: all candidates are attended
            to.
        bypass: that of `lfps`.
    """

    budget: float
    decay: float
    penalty: float
    late: int
    exact: ExactSettings | None
    bypass: Bypass


class Tables(NamedTuple):
    """One layer's Φ and Ψ, both times decay^-(steps since `History.born`).

    Instead of decaying old entries, each step adds new ones on a larger scale. bfloat16 has
    float32's range, and 8 bits suffice for numbers that are only compared: an entry that is
    attended to at each step grows by a factor of 1 / decay per step, 5 % by default, while one bit
    is 0.4 to 0.8 %. Tables of heads that report nothing for a long time stop decaying before they
    vanish: only ratios count.

    Ψ(Δ) is at index Δ, or at Δ + 1 if tables are not aligned.
    """

    vertical: BFloat16[Array, "B K S"]
    distance: BFloat16[Array, "B K S"]


class History(NamedTuple):
    """The state; rows own all of it.

    Attributes:
        tables: the tables of each layer.
        born: the position of each row at which its tables had their true values.
        prompts: the summary of the prompt in each layer, for the bypass only; otherwise empty.
    """

    tables: tuple[Tables, ...]
    born: Rows
    prompts: tuple[PromptSummary, ...]


@builder
def lfps(
    budget: float = 0.04,
    candidates: Candidates = "top",
    a: float = 0.2,
    decay: float = 0.95,
    exact: bool = False,
    bypass: Bypass = False,
    floor: bool = False,
    penalty: float = 0.0,
    wider: int = 3,
    aligned: bool = True,
) -> Policy:
    """Attends to the share `budget` of a row's tokens, predicted from earlier steps.

    These are k = ceil(budget · length) tokens per KV head, including the first 4 and the newest. If
    k is below 5, a head attends to the oldest k and the newest.

    Args:
        budget: the share of tokens whose K and V are attended to.
        candidates: "top" lists the tokens with the largest max(Φ, Ψ); "threshold" lists outliers of
            either table and their neighbours, at most wider · k. It needs exact=True.
        a: the factor of the threshold; the paper uses 0.2 and 0.3.
        decay: r, the factor of both tables per step. Above 0.99, bfloat16 rounds away much of each
            addition.
        exact: whether wider · k candidates are listed and exact weights choose k among them.
        bypass: whether a KV head that attends almost only to the sinks skips its search. True
            attends to the sinks and to one token that represents the mean of the prompt; "mean"
            returns the mean of the prompt's values, as in the paper's algorithm 1.
        floor: whether "threshold" lists at least k candidates, those with the largest max(Φ, Ψ).
        penalty: the part of their mean weight that attended tokens lose in both tables; the paper's
            is 0.5.
        wider: the maximum number of candidates in multiples of k, with exact=True. The paper has no
            limit: from 1 / budget on, there is none.
        aligned: whether attention to a distance points to that distance from the next token. False
            points one position further back, as the paper's equations 4, 7 and 10 do if taken
            literally.
    """
    fraction("budget", budget)
    one_of("candidates", candidates, get_args(Candidates))
    number_in("a", a, "(0, inf)")
    number_in("decay", decay, "(0, 1)")
    below_one("penalty", penalty)
    flag("exact", exact)
    one_of("bypass", bypass, (True, False, "mean"))
    flag("floor", floor)
    flag("aligned", aligned)
    whole_number("wider", wider, minimum=1)
    if candidates == "threshold" and not exact:
        raise ValueError("candidates='threshold': must be 'top' with exact=False")
    if floor and candidates == "top":
        raise ValueError("floor=True: must be False with candidates='top'")

    settings = Settings(
        budget,
        decay,
        penalty,
        0 if aligned else 1,
        ExactSettings(candidates, a, floor, wider) if exact else None,
        bypass,
    )
    period = max(int(math.log(MAX_SCALE) / -math.log(decay)), 1)
    return Policy(
        partial(select, settings),
        init=partial(init, settings),
        prefill=partial(prefill, settings),
        update=partial(update, settings),
        services=Services(partial(maintain, settings), period),
        stats=lambda layer: "listed_logits",
        window=WINDOW,
        shares="keys",
        per_row={"budget": fraction},
        reads=0,
    )


def init(settings: Settings, spec: CacheSpec) -> History:
    """Returns empty tables."""
    slots, layers = (spec.batch, spec.num_kv_heads, spec.capacity), range(spec.num_layers)
    return History(
        tuple(Tables(*(jnp.zeros(slots, jnp.bfloat16) for _ in range(2))) for _ in layers),
        jnp.zeros(spec.batch, jnp.int32),
        tuple(no_prompt(spec) for _ in layers) if settings.bypass else (),
    )


def prefill(settings: Settings, state: History, layer: int, view: PrefillView) -> History:
    """Builds a layer's tables at the end of the prompt."""
    if not view.last:
        return state
    kv, prompts = view.step.layers[layer], state.prompts
    tables = first_tables(settings, kv, view.q_window, view.window_valid)
    if settings.bypass:
        prompts = at_layer(prompts, layer, described(kv, view.q_window[:, -1]))
    return History(at_layer(state.tables, layer, tables), kv.lengths[:, 0], prompts)


def select(settings: Settings, state: History, layer: int, q: Queries, view: StepView):
    """Lists the k tokens with the largest max(Φ(i), Ψ(t - i)), including sinks and the newest."""
    kv, tables = view.layers[layer], state.tables[layer]
    maximum = share_of(settings.budget, kv.capacity)
    # a head has one token per position; computed from positions, `number` is the same for all
    # layers
    lengths = jnp.broadcast_to(view.positions[:, None] + 1, kv.lengths.shape)
    number = jnp.minimum(wanted(knob(view, "budget", settings.budget), lengths), maximum)
    if settings.exact:
        chosen = chosen_exactly(settings.exact, q, kv, tables, number, maximum)
    else:
        chosen = table_candidates(*tables, kv.lengths, Best(number), capacity=maximum, sink=SINKS)
    if not settings.bypass:
        return chosen, None, state
    prompt, alone = state.prompts[layer], settings.bypass == "mean"
    return *bypassing(chosen, q, kv, prompt, alone=alone), state


def update(
    settings: Settings,
    state: History,
    layer: int,
    stats: Stats | ListedLogits | None,
    view: StepView,
) -> History:
    """Records the weights of attended tokens: Φ(i) ← r · Φ(i) + w(i), Ψ(t - i) likewise."""
    assert isinstance(stats, ListedLogits)
    age = view.positions - state.born + 1
    tables = table_update(
        *state.tables[layer],
        stats,
        view.layers[layer].lengths + settings.late,  # the origin of a slot's distance
        settings.decay ** -age.astype(jnp.float32),
        sink=SINKS,
        penalty=settings.penalty,
    )
    return state._replace(tables=at_layer(state.tables, layer, Tables(*tables)))


def maintain(settings: Settings, state: History, view: StepView) -> tuple[History, KVCache]:
    """Scales the tables back to their true values."""
    left = settings.decay ** (view.positions - state.born).astype(jnp.float32)

    def scaled(tables: Tables) -> Tables:
        greatest = jnp.maximum(*(jnp.max(jnp.abs(x), -1, keepdims=True) for x in tables))
        factor = jnp.where(greatest > FAINT, left[:, None, None], 1.0)
        return Tables(*((x.astype(jnp.float32) * factor).astype(x.dtype) for x in tables))

    return state._replace(tables=tuple(map(scaled, state.tables)), born=view.positions), view.cache


def share_of(budget: float, tokens: int) -> int:
    """Returns ceil(budget · tokens), with a margin so that rounding never adds one."""
    product = budget * tokens
    return max(math.ceil(product - min(1e-6 * product, 1e-3)), 1)


def wanted(budget: float | Float32[Array, "B K"], lengths: Lengths) -> Lengths:
    """Returns k = ceil(budget · length) of every head, with the rounding of `share_of`."""
    product = budget * lengths.astype(jnp.float32)
    return jnp.ceil(product - jnp.minimum(1e-6 * product, 1e-3)).astype(jnp.int32)


def first_tables(
    settings: Settings, kv: LayerCache, queries: Float[Array, "B W N H"], valid: Rows
) -> Tables:
    """Builds both tables from the last `valid` ≤ W prompt queries of each row (equation 4).

    The vertical table's entries sum to their steady-state value if every step adds 1 - penalty,
    less the queries' share of attention to the sinks. Heads are processed one after the other, so
    that only one head's logits exist at a time.
    """
    whole = (1 - settings.penalty) / (1 - settings.decay)
    (batch, heads), size = kv.lengths.shape, queries.shape[1]
    grouped = queries.reshape(batch, size, heads, -1, queries.shape[-1]).swapaxes(1, 2)
    pages = jnp.broadcast_to(
        jnp.arange(kv.num_pages, dtype=jnp.int32), (batch, heads, kv.num_pages)
    )
    slots, nth = jnp.arange(kv.capacity, dtype=jnp.int32), jnp.arange(size, dtype=jnp.int32)

    def of_head(head: tuple[Array, ...]) -> tuple[Array, Array]:
        q, at, nth_head, length, count = head
        own = one_head(kv, nth_head, at, length)
        keys = read_heads(own.k, own)[0, 0]
        logits = scaled_products("wgh,sh->wgs", q, keys)
        position = (length - size + nth)[:, None]  # of each query
        seen = (slots <= position) & (nth >= size - count)[:, None]
        lse = softmax_partial(jnp.where(seen[:, None], logits, -jnp.inf))[2]
        w = group_weights(logits, lse, seen & (slots >= SINKS))
        back = position + settings.late - slots
        backwards = jnp.take_along_axis(w, jnp.clip(back, 0, kv.capacity - 1), axis=1)
        backwards = jnp.where(back >= 0, backwards, 0.0)
        c = whole / jnp.maximum(count, 1)
        return jnp.sum(c * w, axis=0), jnp.sum(c * backwards, axis=0)

    heads_of_rows = jnp.broadcast_to(jnp.arange(heads, dtype=jnp.int32), (batch, heads))
    counts = jnp.broadcast_to(valid[:, None], (batch, heads))
    of_heads = grouped, physical_pages(kv, pages), heads_of_rows, kv.lengths, counts
    flat = jax.tree.map(lambda x: x.reshape(batch * heads, *x.shape[2:]), of_heads)
    tables = jax.lax.map(of_head, flat)
    return Tables(*(x.reshape(batch, heads, -1).astype(jnp.bfloat16) for x in tables))
