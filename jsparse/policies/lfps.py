"""LFPS predicts from past attention what a step will attend to, before its query exists.

Attention often returns to the same position (a vertical line in its map) or to the same distance (a
slash). Each KV head keeps a table for each: Φ(i) over positions, Ψ(Δ) over distances Δ = t - i from
the newest token t. Tokens whose Φ or Ψ is large are candidates; no key is read to find them.

Paper: "Learn from the Past: Fast Sparse Indexing for Large Language Model Decoding" (Yao and Wang),
arXiv:2506.15704.

Where we differ: the slash table is kept over distance, where nothing moves from step to step; the
paper keeps it over position and moves it. Ours points at the same distance from the next token;
taken literally, equations 4, 7 and 10 read the paper's before it has moved, one position too far
back (`aligned=False`). Tables are per KV head, with the maximum of the group's softmaxes as the
weight w. Attended tokens do not lose half of their mean weight, which drives out those that are
attended to a little at every step (`penalty=0.5` is the paper's). By default heads attend to all
candidates, of which there are as many as the budget allows, and no key is read to choose among more
(`exact=True` is the paper's, which sets no bound where ours is `wider`). By default candidates are
the best of max(Φ, Ψ), not those above a threshold from the tables' kurtosis
(`candidates="threshold"` is the paper's, `floor` is ours). The budget counts the sinks. Tables are
bfloat16. No head bypasses by default; with `bypass=True` a KV head does where all query heads of
its group do, and its tables decay where the paper leaves them as they are.
"""

import math
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Bool, Float, Float32

from jsparse.builder import builder
from jsparse.cache import (
    CacheSpec,
    KVCache,
    LayerCache,
    StepView,
    physical_pages,
    read_heads,
    read_slots,
)
from jsparse.hyper_parameters import below_one, fraction, one_of, whole_number
from jsparse.pallas_kernels.table_candidates import Best, Kurtosis, table_candidates
from jsparse.pallas_kernels.table_update import table_update
from jsparse.pallas_kernels.threshold_select import TopK, threshold_select
from jsparse.pallas_kernels.token_sparse_decode.listed_rows import products
from jsparse.partials import (
    ListedLogits,
    Stats,
    Summary,
    group_weights,
    merge,
    softmax_partial,
)
from jsparse.policy import Policy, PrefillView, Services, knob
from jsparse.selection import Selection
from jsparse.shapes import HeadFlags, Lengths, Queries, Rows

Candidates = Literal["top", "threshold"]
SINKS = 4
WINDOW = 32  # s, the last prompt queries from which the tables are built
BYPASS_ABOVE, LOCAL = 0.85, 6  # ε, and the newest tokens that ρ looks at
MOST_SCALE = 2.0**12  # what tables grow by between two renormalisations, or in one step if more
MOST_CANDIDATES = 2**31 - 1  # of a head
FAINT = 2.0**-20  # tables without a larger entry are not scaled down


class Tables(NamedTuple):
    """Holds one layer's Φ and Ψ, both times decay^-(steps since `Past.born`).

    What decays is left as it is, and what is new is added on a larger scale. bfloat16 has float32's
    range, and 8 bits are enough for numbers that are compared: an entry that is attended to at each
    step grows by 1 / decay in every one, 5 % by default, where one bit is 0.4 to 0.8 %. Tables of
    heads that report nothing for long stop to decay before they vanish: only ratios count.

    Ψ(Δ) stands at Δ, or at Δ + 1 where tables are not aligned.
    """

    vertical: BFloat16[Array, "B K S"]
    distance: BFloat16[Array, "B K S"]


class Prompt(NamedTuple):
    """Holds what a layer's bypass knows of the prompt, the sinks left out.

    Attributes:
        number: n, the number of tokens.
        key, value: their means K̄ and V̄.
        spread: σ̂², the variance of the last query's logits over its squared norm.
    """

    number: Lengths
    key: Float32[Array, "B K H"]
    value: Float32[Array, "B K H"]
    spread: Float32[Array, "B N"]


class Past(NamedTuple):
    """Holds the state; rows own all of it.

    Attributes:
        tables: the tables of each layer.
        born: the position of each row at which its tables had their true values.
        prompts: for the bypass alone, what each layer knows of the prompt; else empty.
    """

    tables: tuple[Tables, ...]
    born: Rows
    prompts: tuple[Prompt, ...]


@builder
def lfps(
    budget: float = 0.04,
    candidates: Candidates = "top",
    a: float = 0.2,
    decay: float = 0.95,
    exact: bool = False,
    bypass: bool | Literal["mean"] = False,
    floor: bool = False,
    penalty: float = 0.0,
    wider: int = 3,
    aligned: bool = True,
) -> Policy:
    """Attend to the share `budget` of a row's tokens, those to which earlier steps point.

    These are k = ceil(budget · length) tokens per KV head, the first 4 and the newest among them.
    Where k is below 5, a head attends to the oldest k and the newest.

    Args:
        budget: the share of tokens whose K and V are attended to.
        candidates: "top" lists the tokens of largest max(Φ, Ψ); "threshold" lists what stands out
            of either table, and its neighbours, at most wider · k. It needs exact=True.
        a: the factor of the threshold; the paper uses 0.2 and 0.3.
        decay: r, the part of both tables that is left after a step. Above 0.99, bfloat16 rounds
            away much of what is added.
        exact: whether wider · k candidates are listed and exact weights choose k among them.
        bypass: whether a KV head that looks at nothing but the sinks skips its search. True attends
            to the sinks and to a token that stands for the mean of the prompt; "mean" returns the
            mean of the prompt's values, as the paper's algorithm 1 does.
        floor: whether "threshold" lists at least k candidates, of largest max(Φ, Ψ).
        penalty: the part of their mean weight that attended tokens lose in both tables; the paper's
            is 0.5.
        wider: how many times k candidates there are at most where exact weights choose among them.
            The paper sets no bound: from 1 / budget on, there is none.
        aligned: whether what was attended to at a distance points to that distance from the next
            token. False points one position further back, as the paper's equations 4, 7 and 10
            do, taken literally.
    """
    fraction("budget", budget)
    one_of("candidates", candidates, get_args(Candidates))
    if isinstance(a, bool) or not isinstance(a, int | float) or not 0 < a < math.inf:
        raise ValueError(f"a={a!r}: must be a finite number above 0")
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 < decay < 1:
        raise ValueError(f"decay={decay!r}: must be a number above 0 and below 1")
    below_one("penalty", penalty)
    one_of("exact", exact, (True, False))
    one_of("bypass", bypass, (True, False, "mean"))
    one_of("floor", floor, (True, False))
    one_of("aligned", aligned, (True, False))
    whole_number("wider", wider, least=1)
    if candidates == "threshold" and not exact:
        raise ValueError("candidates='threshold': must be 'top' where exact=False")
    if floor and candidates == "top":
        raise ValueError("floor=True: must be False where candidates='top'")

    # what a table's entries sum to where every step adds 1 - penalty
    whole = (1 - penalty) / (1 - decay)
    late = 0 if aligned else 1

    def init(spec: CacheSpec) -> Past:
        heads = spec.batch, spec.num_kv_heads

        def tables() -> Tables:
            slots = *heads, spec.capacity
            return Tables(jnp.zeros(slots, jnp.bfloat16), jnp.zeros(slots, jnp.bfloat16))

        def prompt() -> Prompt:
            means = *heads, spec.head_dim
            return Prompt(
                jnp.zeros(heads, jnp.int32),
                jnp.zeros(means, jnp.float32),
                jnp.zeros(means, jnp.float32),
                jnp.zeros((spec.batch, spec.num_heads), jnp.float32),
            )

        return Past(
            tuple(tables() for _ in range(spec.num_layers)),
            jnp.zeros(spec.batch, jnp.int32),
            tuple(prompt() for _ in range(spec.num_layers if bypass else 0)),
        )

    def prefill(state: Past, layer: int, view: PrefillView) -> Past:
        if not view.last:
            return state
        held = view.step.layers[layer]
        tables, prompts = list(state.tables), list(state.prompts)
        tables[layer] = first_tables(held, view.q_window, view.window_valid, whole, late)
        if bypass:
            prompts[layer] = described(held, view.q_window[:, -1])
        return Past(tuple(tables), held.lengths[:, 0], tuple(prompts))

    def select(state: Past, layer: int, q: Queries, view: StepView):
        held = view.layers[layer]
        most = share_of(budget, held.capacity)
        # a head holds a token per position; from positions, number is computed once for all layers
        lengths = jnp.broadcast_to(view.positions[:, None] + 1, held.lengths.shape)
        number = jnp.minimum(wanted(knob(view, "budget", budget), lengths), most)
        # with more candidates than a head has slots there is no bound, and products fit in 32 bits
        times = min(wider, MOST_CANDIDATES // most) if exact else 1
        listed = min(most * times, held.capacity)
        if candidates == "threshold":
            least = number if floor else jnp.zeros_like(number)
            rule = Kurtosis(a, least, times * number)
        else:
            rule = Best(times * number if exact else number)
        tables = state.tables[layer]
        chosen = table_candidates(*tables, held.lengths, rule, capacity=listed, sink=SINKS)
        if exact:
            chosen = heaviest(q, held, chosen, number, most)
        if not bypass:
            return chosen, None, state
        passed, summary = bypassed(q, held, state.prompts[layer], alone=bypass == "mean")
        count = jnp.where(passed, 0, chosen.count)
        ids = jnp.where(passed[..., None], 0, chosen.ids)
        return replace(chosen, ids=ids, count=count), summary, state

    def update(state: Past, layer: int, stats: Stats | ListedLogits | None, view: StepView) -> Past:
        assert isinstance(stats, ListedLogits)
        age = view.positions - state.born + 1
        tables = list(state.tables)
        tables[layer] = Tables(
            *table_update(
                *tables[layer],
                stats,
                view.layers[layer].lengths + late,  # what it knows a slot's distance by
                decay ** -age.astype(jnp.float32),
                sink=SINKS,
                penalty=penalty,
            )
        )
        return state._replace(tables=tuple(tables))

    def maintain(state: Past, view: StepView) -> tuple[Past, KVCache]:
        left = decay ** (view.positions - state.born).astype(jnp.float32)

        def scaled(tables: Tables) -> Tables:
            greatest = jnp.maximum(*(jnp.max(jnp.abs(x), -1, keepdims=True) for x in tables))
            factor = jnp.where(greatest > FAINT, left[:, None, None], 1.0)
            return Tables(*((x.astype(jnp.float32) * factor).astype(x.dtype) for x in tables))

        return state._replace(
            tables=tuple(map(scaled, state.tables)), born=view.positions
        ), view.cache

    return Policy(
        select,
        init=init,
        prefill=prefill,
        update=update,
        services=Services(maintain, max(int(math.log(MOST_SCALE) / -math.log(decay)), 1)),
        stats=lambda layer: "listed_logits",
        window=WINDOW,
        shares="keys",
        per_row={"budget": fraction},
        reads=0,
        foresees=not exact and not bypass,
    )


def share_of(budget: float, tokens: int) -> int:
    """Return ceil(budget · tokens), where rounding lets no product pass a whole number."""
    product = budget * tokens
    return max(math.ceil(product - min(1e-6 * product, 1e-3)), 1)


def wanted(budget: float | Float32[Array, "B K"], lengths: Lengths) -> Lengths:
    """Return k = ceil(budget · length) of every head, which `share_of` is of the capacity."""
    product = budget * lengths.astype(jnp.float32)
    return jnp.ceil(product - jnp.minimum(1e-6 * product, 1e-3)).astype(jnp.int32)


def first_tables(
    held: LayerCache, queries: Float[Array, "B W N H"], valid: Rows, whole: float, late: int
) -> Tables:
    """Build both tables from the last `valid` ≤ W prompt queries of each row (equation 4).

    Distances are put down as greater by `late`. The vertical table's entries sum to `whole`, less
    the share of queries that lie in the sinks. Heads are taken one after the other, so that no more
    than the logits of one ever exist.
    """
    (batch, heads), size = held.lengths.shape, queries.shape[1]
    grouped = queries.reshape(batch, size, heads, -1, queries.shape[-1]).swapaxes(1, 2)
    pages = jnp.broadcast_to(
        jnp.arange(held.num_pages, dtype=jnp.int32), (batch, heads, held.num_pages)
    )
    slots, nth = jnp.arange(held.capacity, dtype=jnp.int32), jnp.arange(size, dtype=jnp.int32)

    def of_head(head: tuple[Array, Array, Array, Array]) -> tuple[Array, Array]:
        q, at, length, asked = head
        keys = held.arrays[0][at].reshape(held.capacity, -1)
        logits = scaled_products("wgh,sh->wgs", q, keys)
        position = (length - size + nth)[:, None]  # of each query
        seen = (slots <= position) & (nth >= size - asked)[:, None]
        lse = softmax_partial(jnp.where(seen[:, None], logits, -jnp.inf))[2]
        w = group_weights(logits, lse, seen & (slots >= SINKS))
        back = position + late - slots
        backwards = jnp.take_along_axis(w, jnp.clip(back, 0, held.capacity - 1), axis=1)
        backwards = jnp.where(back >= 0, backwards, 0.0)
        c = whole / jnp.maximum(asked, 1)
        return jnp.sum(c * w, axis=0), jnp.sum(c * backwards, axis=0)

    of_heads = grouped, physical_pages(held, pages), held.lengths, valid[:, None] + 0 * held.lengths
    flat = jax.tree.map(lambda x: x.reshape(batch * heads, *x.shape[2:]), of_heads)
    tables = jax.lax.map(of_head, flat)
    return Tables(*(x.reshape(batch, heads, -1).astype(jnp.bfloat16) for x in tables))


def heaviest(
    q: Queries, held: LayerCache, chosen: Selection, number: Lengths, capacity: int
) -> Selection:
    """List the candidates of largest weight, `number` of them, sinks and newest among them.

    Their logits go with them: attention reads their values alone.
    """
    nth = jnp.arange(chosen.ids.shape[-1], dtype=jnp.int32)
    valid = nth < chosen.count[..., None]
    always = (chosen.ids < SINKS) | (chosen.ids == held.lengths[..., None] - 1)
    grouped = q.reshape(*held.lengths.shape, -1, q.shape[-1])
    logits = products(grouped, held.k, held, chosen.ids) * q.shape[-1] ** -0.5
    lse = softmax_partial(jnp.where(valid[:, :, None], logits, -jnp.inf))[2]
    weights = group_weights(logits, lse, valid & ~always)
    weights = jnp.where(always, 2.0, weights)  # above any weight
    best = threshold_select(
        jnp.where(valid, weights, -jnp.inf)[:, :, None],
        TopK(number),
        capacity=capacity,
        weights="raw",
    )
    inside = jnp.arange(capacity, dtype=jnp.int32) < best.count[..., None]
    ids = jnp.where(inside, jnp.take_along_axis(chosen.ids, best.ids, axis=2), 0)
    return replace(best, ids=ids, logits=jnp.take_along_axis(logits, best.ids[:, :, None], axis=3))


def described(held: LayerCache, last: Queries) -> Prompt:
    """Return what the bypass keeps of a prompt whose last query is `last`."""
    slots = jnp.arange(held.capacity, dtype=jnp.int32)
    counted = (slots >= SINKS) & (slots < held.lengths[..., None])
    number = jnp.sum(counted, -1, dtype=jnp.int32)
    some = jnp.maximum(number, 1)[..., None]

    def mean(rows: Float[Array, "B K S H"]) -> Float32[Array, "B K H"]:
        rows = jnp.where(counted[..., None], rows.astype(jnp.float32), 0.0)
        return jnp.sum(rows, axis=2) / some

    keys, values = read_heads(held.k, held), read_heads(held.v, held)
    grouped = last.reshape(*held.lengths.shape, -1, last.shape[-1])
    logits = scaled_products("bkgh,bksh->bkgs", grouped, keys)
    inside = counted[:, :, None]
    centre = jnp.sum(jnp.where(inside, logits, 0.0), -1, keepdims=True) / some[..., None]
    variance = jnp.sum(jnp.where(inside, (logits - centre) ** 2, 0.0), -1) / some
    norm = jnp.sum(jnp.square(last.astype(jnp.float32)), -1)
    spread = variance.reshape(norm.shape) / jnp.where(norm > 0, norm, 1.0)
    return Prompt(number, mean(keys), mean(values), spread)


class SinkAttention(NamedTuple):
    """Holds how the query heads of a step attend to the sinks.

    Attributes:
        log_rho: log ρ, the estimated share of a head's attention that goes to the sinks.
        o, lse: the attention to the sinks alone.
        rest: the estimated logsumexp of the rest of the prompt.
    """

    log_rho: Float32[Array, "B K G"]
    o: Float32[Array, "B K G H"]
    lse: Float32[Array, "B K G"]
    rest: Float32[Array, "B K G"]


def sink_attention(q: Queries, held: LayerCache, prompt: Prompt) -> SinkAttention:
    """Return how query heads attend to the sinks (equations 5 and 6, in logarithms)."""
    lengths = held.lengths[..., None]
    nth = jnp.arange(SINKS, dtype=jnp.int32) + 0 * lengths
    near = lengths - 1 - LOCAL + jnp.arange(LOCAL, dtype=jnp.int32)  # the newest is not among them
    grouped = q.reshape(*held.lengths.shape, -1, q.shape[-1])

    def logits_at(slots: Array, ok: Bool[Array, "B K n"]) -> Float32[Array, "B K G n"]:
        keys = read_slots(held.k, held, jnp.where(ok, slots, 0))
        logits = scaled_products("bkgh,bknh->bkgn", grouped, keys)
        return jnp.where(ok[:, :, None], logits, -jnp.inf)

    weights, total, sinks = softmax_partial(logits_at(nth, nth < lengths))
    local = softmax_partial(logits_at(near, near >= SINKS))[2]
    norm = jnp.sum(jnp.square(grouped.astype(jnp.float32)), -1)
    spread = prompt.spread.reshape(norm.shape)
    rest = jnp.log(prompt.number.astype(jnp.float32))[..., None] + norm * spread / 2
    rest += scaled_products("bkgh,bkh->bkg", grouped, prompt.key)
    log_rho = sinks - jnp.logaddexp(jnp.logaddexp(sinks, rest), local)
    values = read_slots(held.v, held, jnp.where(nth < lengths, nth, 0)).astype(jnp.float32)
    o = jnp.einsum("bkgn,bknh->bkgh", weights / total[..., None], values)
    return SinkAttention(log_rho, o, sinks, rest)


def bypassed(
    q: Queries, held: LayerCache, prompt: Prompt, *, alone: bool
) -> tuple[HeadFlags, Summary]:
    """Return the KV heads that bypass, and what they return.

    It is the mean of the prompt's values if `alone`, else the sinks merged with it.
    """
    sinks = sink_attention(q, held, prompt)
    passed = jnp.all(sinks.log_rho > math.log(BYPASS_ABOVE), axis=-1)
    mean = jnp.broadcast_to(prompt.value[:, :, None], sinks.o.shape)
    if alone:
        o, lse = mean, jnp.zeros_like(sinks.rest)
    else:
        o, lse = merge(sinks.o, sinks.lse, mean, sinks.rest)
    lse = jnp.where(passed[..., None], lse, -jnp.inf).reshape(q.shape[:2])
    attended = jnp.where(passed & (not alone), jnp.minimum(held.lengths, SINKS), 0)
    read = jnp.where(passed, jnp.minimum(held.lengths, SINKS + LOCAL), 0)
    return passed, Summary(o.reshape(q.shape), lse, attended, read)


def scaled_products(letters: str, q: Array, keys: Array) -> Array:
    """Return logits in float32, of rows of q and keys whose last axis both sum over."""
    products = jnp.einsum(letters, q, keys, preferred_element_type=jnp.float32)
    return products * q.shape[-1] ** -0.5
