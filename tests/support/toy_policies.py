"""Toy policies: five use the parts of the contract that one of the papers' methods needs, and
little else. `prompt_ends` evicts before the first step, `parity` needs a constant of the model, and
`counted` reports how many tokens its summary counts.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jsparse.builder import builder
from jsparse.cache import LayerCache, read_heads, replace_layer, slot_positions, truncate
from jsparse.policy import Eviction, Policy, Services
from jsparse.policy import at_layer as replaced
from jsparse.selection import Selection, from_token_mask, window
from jsparse.selection.partials import Summary, softmax_partial
from jsparse.selection.threshold import compact, top_k_mask


def mean_query(q, num_kv_heads):
    return q.reshape(q.shape[0], num_kv_heads, -1, q.shape[-1]).mean(axis=2)


def slot_index(held: LayerCache):
    return jnp.arange(held.capacity, dtype=jnp.int32)


def masked_logits(query, held: LayerCache):
    """q·k/√H of one query per KV head, -inf past the head's length."""
    logits = jnp.einsum("bkh,bksh->bks", query, read_heads(held.k, held)) * query.shape[-1] ** -0.5
    return jnp.where(slot_index(held) < held.lengths[..., None], logits, -jnp.inf)


def store(table, slots, values):
    """table[b, slots[b, t]] = values[b, t]; slots past the end are dropped."""
    return table.at[jnp.arange(table.shape[0])[:, None], slots].set(values, mode="drop")


def chunk_slots(view, capacity):
    """The slots of a chunk's tokens, past the end for padding."""
    step = jnp.arange(view.tokens.shape[1], dtype=jnp.int32)
    return jnp.where(step < view.valid[:, None], view.positions, capacity)


@builder
def page_bound(pages: int = 3) -> Policy:
    """Like Twilight: a sidecar of K (the maximum of each page) ranks pages; exact logits and the
    token ids set the bits.

    Of the best pages it keeps the tokens with a logit of at least the mean over those pages, or
    with an even id.
    """

    def init(spec):
        maxima = jnp.full(
            (spec.batch, spec.num_kv_heads, spec.num_pages, spec.head_dim), -jnp.inf, jnp.float32
        )
        ids = jnp.zeros((spec.batch, spec.capacity), jnp.int32)
        return tuple((maxima, ids) for _ in range(spec.num_layers))

    def taken_in(entry, k, tokens, slots, page_size):
        maxima, ids = entry
        row = jnp.arange(tokens.shape[0])[:, None]
        maxima = maxima.at[row, :, slots // page_size].max(k.astype(jnp.float32), mode="drop")
        return maxima, store(ids, slots, tokens)

    def prefill(state, layer, view):
        held = view.step.layers[layer]
        slots = chunk_slots(view, held.capacity)
        return replaced(
            state, layer, taken_in(state[layer], view.k, view.tokens, slots, held.page_size)
        )

    def append(state, layer, k, v, tokens, positions, view):
        page_size = view.layers[layer].page_size
        return replaced(state, layer, taken_in(state[layer], k, tokens, positions, page_size))

    def select(state, layer, q, view):
        held = view.layers[layer]
        maxima, ids = state[layer]
        grouped = q.reshape(q.shape[0], maxima.shape[1], -1, q.shape[-1])
        used = jnp.arange(held.num_pages) * held.page_size < held.lengths[..., None]
        bound = jnp.einsum(
            "bkgh,bkmh->bkgm", jax.nn.relu(grouped), jnp.where(used[..., None], maxima, 0.0)
        ).max(2)
        chosen = jnp.repeat(
            top_k_mask(jnp.where(used, bound, -jnp.inf), pages), held.page_size, axis=-1
        )
        logits = jnp.where(chosen, masked_logits(mean_query(q, maxima.shape[1]), held), -jnp.inf)
        real = logits > -jnp.inf
        mean = jnp.sum(jnp.where(real, logits, 0.0), -1, keepdims=True) / jnp.sum(
            real, -1, keepdims=True
        )
        mask = real & ((logits >= mean) | (ids % 2 == 0)[:, None])
        return (
            from_token_mask(mask, pages, page_size=held.page_size, granularity="page"),
            None,
            state,
        )

    return Policy(select, init=init, prefill=prefill, append=append)


@builder
def inherit(pages: int = 2, share: float = 0.02) -> Policy:
    """Like LycheeDecode: the tokens that one layer attends to by mass become the next layer's set,
    head by head.

    Layer 0 is dense, and so is head 0 of layer 1. Dense heads pick: the pages of at least `share`
    of the mean query's mass, at most `pages` of them. Sparse heads pass their set on, and merge a
    summary token of logit 0. Each component of the summary is the sum of the generated keys' first
    components over the length: a sidecar that only `append` writes, to detect whether corrections
    append again.
    """

    def init(spec):
        heads = (spec.batch, spec.num_kv_heads)
        chosen = (
            jnp.zeros((*heads, min(pages, spec.num_pages)), jnp.int32),
            jnp.zeros(heads, jnp.int32),
        )
        sidecar = jnp.zeros((*heads, spec.capacity))
        return tuple((chosen, sidecar) for _ in range(spec.num_layers))

    def append(state, layer, k, v, tokens, positions, view):
        chosen, sidecar = state[layer]
        at = jnp.arange(tokens.shape[0])[:, None], slice(None), positions
        return replaced(state, layer, (chosen, sidecar.at[at].set(k[..., 0].astype(jnp.float32))))

    def dense_flags(layer, held):
        head = jnp.arange(held.lengths.shape[1])
        return jnp.broadcast_to((layer == 0) | ((layer == 1) & (head == 0)), held.lengths.shape)

    def select(state, layer, q, view):
        (ids, count), sidecar = state[layer]
        held, group = view.layers[layer], q.shape[1] // count.shape[1]
        dense = dense_flags(layer, held)
        value = jnp.repeat(sidecar.sum(-1) / held.lengths, group, axis=1)
        lse = jnp.repeat(jnp.where(dense, -jnp.inf, 0.0), group, axis=1)
        return (
            Selection(ids, count, dense=dense),
            Summary(jnp.broadcast_to(value[..., None], q.shape), lse),
            state,
        )

    def update(state, layer, stats, view):
        if layer + 1 == len(state):
            return state
        held, ((inherited_ids, inherited_count), _) = view.layers[layer], state[layer]
        mass = jnp.exp(stats.scores - stats.lse[..., None])
        scores = jnp.where(mass >= share, stats.scores, -jnp.inf)
        ids, count = compact(top_k_mask(scores, pages), inherited_ids.shape[-1])
        picks = dense_flags(layer, held)
        handed = (
            jnp.where(picks[..., None], ids, inherited_ids),
            jnp.where(picks, count, inherited_count),
        )
        return replaced(state, layer + 1, (handed, state[layer + 1][1]))

    return Policy(
        select,
        init=init,
        append=append,
        update=update,
        stats=lambda layer: "page_mass",
        services=Services(correct_every=8),
    )


@builder
def bypass(budget: int = 6, decay: float = 0.9) -> Policy:
    """Like LFPS: a table of scores by position predicts the tokens; some heads skip attention for a
    summary.

    A KV head is bypassed if its mean query prefers token 0 to the newest: its result is the mean
    value alone. All other heads also merge a summary token (value 0's, with the logit of token 0
    less one).
    """

    def init(spec):
        shape = (spec.batch, spec.num_kv_heads, spec.capacity)
        return tuple(jnp.zeros(shape) for _ in range(spec.num_layers))

    def prefill(state, layer, view):
        if not view.last:
            return state
        held = view.step.layers[layer]
        window = view.q_window.shape[1]
        table = jnp.zeros_like(state[layer])  # a further turn rebuilds it
        for j in range(window):
            back = window - 1 - j
            logits = masked_logits(mean_query(view.q_window[:, j], held.lengths.shape[1]), held)
            logits = jnp.where(
                slot_index(held) < (held.lengths - back)[..., None], logits, -jnp.inf
            )
            weights, total, _ = softmax_partial(logits)
            inside = (back < view.window_valid)[:, None, None]
            table += jnp.where(inside, weights / jnp.maximum(total, 1e-30)[..., None], 0.0)
        return replaced(state, layer, table)

    def select(state, layer, q, view):
        held = view.layers[layer]
        heads = held.lengths.shape[1]
        logits = masked_logits(mean_query(q, heads), held)
        newest = jnp.take_along_axis(logits, held.lengths[..., None] - 1, axis=-1)[..., 0]
        skipped = logits[..., 0] > newest
        seen = slot_index(held) < held.lengths[..., None]
        mask = top_k_mask(jnp.where(seen, state[layer], -jnp.inf), budget) & ~skipped[..., None]
        chosen = from_token_mask(mask, budget, page_size=held.page_size)

        group = q.shape[1] // heads
        values = jnp.where(seen[..., None], read_heads(held.v, held), 0.0)
        mean_value = values.sum(2) / held.lengths[..., None]
        value = jnp.repeat(
            jnp.where(skipped[..., None], mean_value, values[:, :, 0]), group, axis=1
        )
        key = jnp.repeat(read_heads(held.k, held)[:, :, 0], group, axis=1)
        lse = jnp.einsum("bnh,bnh->bn", q, key) * q.shape[-1] ** -0.5 - 1.0
        return chosen, Summary(value.astype(jnp.float32), lse.astype(jnp.float32)), state

    def update(state, layer, stats, view):
        some = jnp.isfinite(stats.lse)[..., None]
        weights = jnp.where(
            some, jnp.exp(stats.scores - jnp.where(some, stats.lse[..., None], 0.0)), 0.0
        )
        return replaced(state, layer, decay * state[layer] + weights)

    return Policy(
        select,
        init=init,
        prefill=prefill,
        update=update,
        stats=lambda layer: "token_logits",
        window=4,
    )


@builder
def shrink(period: int = 8, newest: int = 5) -> Policy:
    """Like HARD-KV: every `period` steps heads lose tokens, each head different ones, and the rest
    is rewritten in order.

    It keeps slot 0, the newest `newest + 2 · head + layer`, and keys longer than the head's mean; a
    kept slot's bias becomes log(exp(bias) + the number dropped right before it). It attends to
    slots with a bias, or with a position whose remainder by 5 is not 2.
    """

    def select(state, layer, q, view):
        held = view.layers[layer]
        seen = slot_index(held) < held.lengths[..., None]
        mask = seen & ((slot_positions(held) % 5 != 2) | (read_heads(held.bias, held) > 0))
        return (
            from_token_mask(mask, held.num_pages, page_size=held.page_size, granularity="page"),
            None,
            state,
        )

    def maintain(state, view):
        cache = view.cache
        for layer, held in enumerate(cache.layers):
            cache = replace_layer(cache, layer, shrunk(held, layer))
        return state, cache

    def shrunk(held, layer):
        slots, lengths = slot_index(held), held.lengths[..., None]
        seen = slots < lengths
        keys = read_heads(held.k, held)
        norms = jnp.where(seen, jnp.sqrt(jnp.sum(keys * keys, -1)), 0.0)
        window = (newest + layer + 2 * jnp.arange(held.lengths.shape[1]))[:, None]
        keep = seen & (
            (slots == 0)
            | (slots >= lengths - window)
            | (norms > norms.sum(-1, keepdims=True) / lengths)
        )
        order, count = compact(keep, held.capacity)
        before = jnp.concatenate([jnp.full_like(order[..., :1], -1), order[..., :-1]], -1)
        dropped = (order - before - 1).astype(jnp.float32)
        bias = jnp.take_along_axis(read_heads(held.bias, held), order, -1)

        def moved(pool):
            rows = read_heads(pool, held)
            return jnp.take_along_axis(
                rows, order.reshape(*order.shape, *[1] * (rows.ndim - 3)), axis=2
            )

        def put(pool, rows):
            rows = rows.reshape(*held.lengths.shape, held.num_pages, *pool.shape[1:])
            return (
                rows.reshape(pool.shape)
                if held.block_table is None
                else pool.at[held.block_table].set(rows)
            )

        held = held._replace(
            k=put(held.k, moved(held.k)),
            v=put(held.v, moved(held.v)),
            slot_positions=put(held.slot_positions, moved(held.slot_positions)),
            bias=put(held.bias, jnp.log(jnp.exp(bias) + dropped)),
        )
        return truncate(held, count)

    return Policy(
        select,
        services=Services(maintain, period),
        needs=("bias", "slot_positions"),
        eviction=Eviction(),
    )


@builder
def even_ids(budget: int = 12, recent: int = 3, within: int = 24) -> Policy:
    """Like LycheeCluster: lists single tokens by id: even ids, the newest `budget` of them, and the
    last.

    Rows are dense up to `within` tokens.
    """

    def init(spec):
        return tuple(
            jnp.zeros((spec.batch, spec.capacity), jnp.int32) for _ in range(spec.num_layers)
        )

    def prefill(state, layer, view):
        slots = chunk_slots(view, state[layer].shape[1])
        return replaced(state, layer, store(state[layer], slots, view.tokens))

    def append(state, layer, k, v, tokens, positions, view):
        return replaced(state, layer, store(state[layer], positions, tokens))

    def select(state, layer, q, view):
        held = view.layers[layer]
        slots, lengths = slot_index(held), held.lengths[..., None]
        even = (slots < lengths) & (state[layer] % 2 == 0)[:, None]
        even = top_k_mask(jnp.where(even, slots.astype(jnp.float32), -jnp.inf), budget)
        mask = even | ((slots < lengths) & (slots >= lengths - recent))
        chosen = from_token_mask(mask, budget + recent, page_size=held.page_size)
        return Selection(chosen.ids, chosen.count, granularity="token"), None, state

    return Policy(
        select, init=init, prefill=prefill, append=append, dense_below=lambda held: within + 1
    )


@builder
def prompt_ends(newest: tuple = (6, 3)) -> Policy:
    """Evicts after the prompt: head k keeps token 0 and the newest `newest[k]`; new tokens stay.

    The bias of token 0 becomes the logarithm of 1 + the number dropped. It attends to all held
    tokens except positions whose remainder by 5 is 2. Only for caches without a block table.
    """

    def after_prompt(state, view, slots):
        return state, view.cache._replace(layers=tuple(cut(held, slots) for held in view.layers))

    @partial(jax.jit, static_argnums=1)
    def cut(held, max_length):
        slots, lengths = slot_index(held), held.lengths[..., None]
        recent = lengths - jnp.asarray(newest)[:, None]
        order, count = compact(
            (slots < lengths) & ((slots == 0) | (slots >= recent)),
            -(-max_length // held.page_size) * held.page_size,
        )

        def moved(pool):
            rows = read_heads(pool, held)
            rows = jnp.take_along_axis(
                rows, order.reshape(*order.shape, *[1] * (rows.ndim - 3)), axis=2
            )
            return rows.reshape(-1, held.page_size, *pool.shape[2:])

        first = jnp.arange(order.shape[-1]) == 0
        bias = jnp.where(first, jnp.log(1.0 + held.lengths - count)[..., None], 0.0)
        return held._replace(
            k=moved(held.k),
            v=moved(held.v),
            slot_positions=moved(held.slot_positions),
            bias=bias.reshape(-1, held.page_size),
            lengths=count,
        )

    def select(state, layer, q, view):
        held = view.layers[layer]
        seen = slot_index(held) < held.lengths[..., None]
        mask = seen & (slot_positions(held) % 5 != 2)
        return from_token_mask(mask, held.capacity, page_size=held.page_size), None, state

    return Policy(
        select,
        needs=("bias", "slot_positions"),
        eviction=Eviction(
            after_prompt, lambda prompt_tokens, new: min(prompt_tokens, 1 + max(newest)) + new
        ),
    )


@builder
def parity(shift: int | None = None) -> Policy:
    """Lists the last `3 + shift` tokens, and those with an even id plus `shift`.

    None: every hook takes the shift from the model's constants.
    """

    def of(view):
        return view.constants["shift"] if shift is None else shift

    def init(spec):
        return tuple(
            jnp.zeros((spec.batch, spec.capacity), jnp.bool_) for _ in range(spec.num_layers)
        )

    def prefill(state, layer, view):
        slots = chunk_slots(view, state[layer].shape[1])
        even = (view.tokens + of(view.step)) % 2 == 0
        return replaced(state, layer, store(state[layer], slots, even))

    def append(state, layer, k, v, tokens, positions, view):
        even = (tokens + of(view)) % 2 == 0
        return replaced(state, layer, store(state[layer], positions, even))

    def select(state, layer, q, view):
        held = view.layers[layer]
        slots, lengths = slot_index(held), held.lengths[..., None]
        recent = slots >= lengths - 3 - of(view)
        mask = (slots < lengths) & (recent | state[layer][:, None])
        return from_token_mask(mask, held.capacity, page_size=held.page_size), None, state

    return Policy(
        select,
        init=init,
        prefill=prefill,
        append=append,
        needs=("shift",) if shift is None else (),
    )


@builder
def counted(recent: int = 4, attended: int = 2, read: int = 3, plain: bool = False) -> Policy:
    """Lists the last tokens, beside a summary of value 0 and logit 0 in head 1 that counts tokens.

    With `plain` it is a pair (o, lse), which counts none.
    """

    def select(state, layer, q, view):
        held = view.layers[layer]
        chosen = window(
            held.lengths,
            sink=0,
            recent=recent,
            num_pages=held.num_pages,
            page_size=held.page_size,
            granularity="token",
        )
        second = jnp.arange(held.lengths.shape[1]) == 1
        lse = jnp.repeat(jnp.where(second, 0.0, -jnp.inf), q.shape[1] // len(second))
        partial = jnp.zeros(q.shape), jnp.broadcast_to(lse, q.shape[:2])
        if plain:
            return chosen, partial, state
        counts = (jnp.broadcast_to(second * n, held.lengths.shape) for n in (attended, read))
        return chosen, Summary(*partial, *counts), state

    return Policy(select)
