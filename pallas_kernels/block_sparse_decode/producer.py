# pyright: reportAssignmentType=false
"""The copying (producer) warpgroup, which finds its team's splits and sends their tiles."""

from functools import partial
from itertools import cycle

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jsparse.pallas_kernels.block_sparse_decode import schedule
from jsparse.pallas_kernels.block_sparse_decode.entries import Entries
from jsparse.pallas_kernels.block_sparse_decode.heads import (
    lacks_newest,
    last_listed,
    load_head,
    next_with_tiles,
)
from jsparse.pallas_kernels.block_sparse_decode.problem import WARPS, Problem
from jsparse.pallas_kernels.block_sparse_decode.refs import GlobalRefs, SharedRefs
from jsparse.pallas_kernels.block_sparse_decode.registers import operations

AHEAD = 2  # tiles of lookahead in loading entries


def produce(
    p: Problem,
    g: GlobalRefs,
    s: SharedRefs,
) -> None:
    """Finds the team's splits and sends their tiles: pages by TMA, and a bit per attended token.

    A run is one head's splits of a team. A tile's entries are loaded two tiles ahead, the next
    run's head before this run's tiles are sent, and its list after them, so tiles wait only for
    their own data. The warps share a tile's pages.
    """
    per_tile, team = p.pages_a_tile, lax.axis_index("warpgroup") - p.tiles.teams
    _share_out(p, g, s, team)
    first, base, start, end = (s.share_s[team, i] for i in range(4))

    load, settle, announce = (
        partial(load_head, p, g),
        partial(next_with_tiles, p, g),
        partial(_announce, p, g, s, team),
    )

    def fetch(h, head, split):
        """Loads the entries of a split's first tile, and the last entry of the head's list."""
        pages, tile = Entries(p, g, h, head), schedule.bounds(head.tiles, head.splits, split)[0]
        found = tuple(pages.fetch(tile * per_tile + j) for j in range(per_tile))
        return found, last_listed(p, g, h, head)

    def send(carry):
        n, sent, (h, base, head, ahead), split, (found, last) = carry
        later = load(h + 2)
        # this team takes [split, splits): the splits that start before its share ends
        splits = jnp.minimum(schedule.beginning(head.tiles, head.splits, end - base), head.splits)
        # the last split adds the newest page, in an extra tile if the list fills its tiles
        missing = lacks_newest(p, g, h, head, last) & (splits == head.splits)
        t0, t1 = (schedule.bounds(head.tiles, head.splits, i)[0] for i in (split, splits))
        extra = jnp.where(missing & (lax.rem(head.count, per_tile) == 0), 1, 0)
        first_row = lax.rem(h, p.heads_a_window) * p.queries
        announce(n, h, split, splits, head.tiles, head.splits, extra, sent, first_row)

        entries = Entries(p, g, h, head)
        # A TMA copy by a warpgroup synchronises all its 128 threads. Sharing the pages among the
        # warps took the hybrid case from 584 to 562 us (bench/README.md).
        plgpu.warp_map(
            lambda warp: _send_tiles(
                p, s, team, warp, entries, missing, sent, t0, t1 + extra, found
            )
        )

        following = settle(h + 1, base + head.tiles, ahead, later)
        found_next = fetch(following[0], following[2], 0)
        return n + 1, sent + t1 + extra - t0, following, jnp.int32(0), found_next

    def more(carry):
        h, base, *_ = carry[2]
        return (h < p.pairs) & (base < end)

    # the first head's splits that start at `start` or later; there may be none
    head, ahead = load(first), load(first + 1)
    split = schedule.beginning(head.tiles, head.splits, start - base)
    none = split >= head.splits
    head, ahead, base, first, split = jax.tree.map(
        lambda a, b: jnp.where(none, a, b),
        (ahead, load(first + 2), base + head.tiles, first + 1, jnp.int32(0)),
        (head, ahead, base, first, split),
    )
    state, zero = settle(first, base, head, ahead), jnp.int32(0)
    n, sent, *_ = lax.while_loop(
        more, send, (zero, zero, state, split, fetch(state[0], state[2], split))
    )
    announce(n, *[zero] * 8)  # an end of 0 splits stops the consumer

    _drain(p, s, team, n, sent)


def _announce(p: Problem, g: GlobalRefs, s: SharedRefs, team, n, *values) -> None:
    """Writes the nth run for the consumer and sends its queries."""
    slot = team * p.runs + lax.rem(n, p.runs)

    @pl.when(n >= p.runs)
    def _():
        plgpu.barrier_wait(s.run_free.at[slot])

    for i, value in enumerate(values):
        s.run_s[slot, i] = value
    plgpu.barrier_arrive(s.run_full.at[slot])
    queries = g.q.at[lax.div(values[0], p.heads_a_window)]
    plgpu.copy_gmem_to_smem(queries, s.q_s.at[slot], s.q_full.at[slot])


def _drain(p: Problem, s: SharedRefs, team, n, sent) -> None:
    """Waits until the consumer has used everything that n runs sent."""
    if p.runs == 2:  # with one slot, announcing the end has already waited for the last run

        @pl.when(n >= 1)
        def _():
            plgpu.barrier_wait(s.run_free.at[team * p.runs + lax.rem(n - 1, p.runs)])

    @plgpu.warp_map
    def _(warp):
        for free, copies in zip((s.k_free, s.v_free), _duties(p, warp)[1:], strict=True):

            @pl.when(copies)
            def _(free=free):
                for i in range(p.tiles.stages):
                    _wait_for_room(p, free, team, sent + i)


def _share_out(p: Problem, g: GlobalRefs, s: SharedRefs, team) -> None:
    """Finds each team's share of the tiles: its first and end tile, and its first head.

    The first team does it for all teams of the block.
    """

    @pl.when(team == 0)
    def _():
        load = operations(p).load_heads
        dense = load(g.dense) if p.has_dense else None
        num_tiles = schedule.num_tiles(load(g.lengths), load(g.count), dense, p.page_size, p.tiles)
        sums = _adder(p, s)
        (total,) = sums(num_tiles)
        first = lax.axis_index("block") * p.tiles.teams
        # tile indices, over all heads, at which the shares start
        edges = [lax.div((first + i) * total, p.tiles.shares) for i in range(p.tiles.teams + 1)]
        heads, bases = schedule.find(num_tiles, p.pairs, edges[:-1], sums)
        for i in range(p.tiles.teams):
            for j, value in enumerate((heads[i], bases[i], edges[i], edges[i + 1])):
                s.share_s[i, j] = value
        plgpu.barrier_arrive(s.shared)

        # every block computes the same, so one writes
        @pl.when(lax.axis_index("block") == 0)
        def _():
            g.splits[...] = schedule.num_splits(num_tiles, p.tiles)

    plgpu.barrier_wait(s.shared)


def _adder(p: Problem, s: SharedRefs):
    """Returns a function that sums each of several vectors of the warpgroup.

    A call synchronises the warpgroup once. Its results are read before the next call synchronises,
    so two alternating buffers are enough.
    """
    turns = cycle(range(2))

    def sums(*vectors):
        turn = next(turns)
        operations(p).add_by_warp(s.sums_s.at[turn], *vectors)
        return [sum(s.sums_s[turn, i, warp] for warp in range(WARPS)) for i in range(len(vectors))]

    return sums


def _wait_for_room(p: Problem, free, team, nth) -> None:
    """Waits until the consumer has freed the slot of the team's nth tile."""

    @pl.when(nth >= p.tiles.stages)
    def _():
        plgpu.barrier_wait(free.at[team * p.tiles.stages + lax.rem(nth, p.tiles.stages)])


def _duties(p: Problem, warp):
    """Returns a warp's pages of a tile, whether it copies their K, and whether it copies their V.

    With four or more pages per tile, a warp copies K and V of every fourth; with fewer, K or V of
    one. It waits only for the slots that it fills: another slot's barrier could complete two phases
    meanwhile and show the same parity again, and the wait would never end.
    """
    n = p.pages_a_tile
    mine = [lax.rem(warp, min(n, WARPS)) + i for i in range(0, max(n, WARPS), WARPS)]
    return mine, warp < n, warp >= 0 if n >= WARPS else (warp >= n) & (warp < 2 * n)


def _send_tiles(p: Problem, s: SharedRefs, team, warp, pages, missing, sent, t0, t1, found) -> None:
    """Sends one warp's part of tiles t0 to t1 of a head; `found` has the entries of tile t0."""
    stages, n = p.tiles.stages, p.pages_a_tile
    mine, copies_k, copies_v = _duties(p, warp)

    def first(j):
        """Returns found[j] by selects, since j differs between warps."""
        choice = found[0]
        for k in range(1, n):
            choice = tuple(
                jnp.where(j == k, new, old) for new, old in zip(found[k], choice, strict=True)
            )
        return choice

    def fetch(tile):
        return tuple(pages.fetch(jnp.minimum(tile, t1 - 1) * n + j) for j in mine)

    def tile(i, ahead):
        found, *ahead = ahead
        slot = lax.rem(sent + i, stages)
        ahead.append(fetch(t0 + i + AHEAD))
        resolved = [
            pages.resolve((t0 + i) * n + j, missing, *f) for j, f in zip(mine, found, strict=True)
        ]

        def copy(j, page, pool, smem, full):
            target = smem.at[team, slot, pl.ds(j * p.page_size, p.page_size)]
            plgpu.copy_gmem_to_smem(pool.at[page], target, full.at[team * stages + slot])

        @pl.when(copies_k)
        def _():
            _wait_for_room(p, s.k_free, team, sent + i)
            for j, (page, words) in zip(mine, resolved, strict=True):
                for w, word in enumerate(words):
                    s.words_s[team * stages + slot, j + w] = word
                copy(j, page, pages.g.k, s.k_s, s.k_full)
                if p.has_bias:
                    target = s.bias_s.at[team, slot, j, pl.ds(0, p.page_size)]
                    plgpu.copy_gmem_to_smem(
                        pages.g.bias.at[page], target, s.k_full.at[team * stages + slot]
                    )

        @pl.when(copies_v)
        def _():
            _wait_for_room(p, s.v_free, team, sent + i)
            for j, (page, _) in zip(mine, resolved, strict=True):
                copy(j, page, pages.g.v, s.v_s, s.v_full)

        return tuple(ahead)

    ahead = (tuple(first(j) for j in mine), *(fetch(t0 + i) for i in range(1, AHEAD)))
    lax.fori_loop(0, t1 - t0, tile, ahead)
