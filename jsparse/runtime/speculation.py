"""Speculative decoding: a policy drafts tokens, and dense attention verifies them.

In a verification round each row drafts a few tokens under its policy. Then all of them run through
the model again, as one dense chunk, which overwrites their K and V. After each of them a token is
chosen as dense decoding would choose it there. Drafts are accepted up to the first that differs
from its choice; that choice is also kept, so a round gives at least one token. This is speculative
decoding (Leviathan et al., arXiv:2211.17192) with the model as its own draft model.

Draft and verification sample with the same random numbers, derived from the row's seed and the
token's number. So the text is exactly the one that dense decoding samples from that seed, not only
one of the same distribution.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from jsparse.cache import KVCache, ReadOnly, grow, spec_of, step_view, taken, truncate
from jsparse.hooks import State
from jsparse.models.transformer import Decoder, Weights, to_logits
from jsparse.policy import Policy, maintained
from jsparse.runtime.chunk_attention import attend_few
from jsparse.runtime.compilation import inlined, note_trace, program
from jsparse.runtime.correct import recomputed
from jsparse.runtime.decode_step import StepStats
from jsparse.runtime.rows import Batch, Step, looped, one_step
from jsparse.runtime.sampling import ChooseFn
from jsparse.runtime.shared_pages import SharedPages
from jsparse.runtime.spread_programs import REPLICATED, SHARDED
from jsparse.runtime.state_axes import keep_inactive
from jsparse.shapes import Rows


class VerificationRound(NamedTuple):
    """The results of a verification round of up to n tokens, on the device.

    Attributes:
        tokens, logprobs: the chosen tokens and their log-probabilities, equal to those of dense
            decoding.
        counts: the number of valid tokens per row (a prefix).
        drafted: the number of drafted tokens per row; `counts - 1` of them were accepted.
        stats: the shares that each draft attended and read in each layer, [drafts, L, B]; valid for
            the drafts that a row made.
        overflow: the rows that had run out of room, of all tokens or of each; they choose nothing.
        logits: the logits that the tokens were chosen from.
    """

    tokens: Int32[Array, "n B"]
    logprobs: Float32[Array, "n B"]
    counts: Rows
    drafted: Rows
    stats: StepStats
    overflow: Bool[Array, "*n B"]
    logits: Float32[Array, "n B V"]

    @property
    def shares(self) -> StepStats:
        """The shares of each token of a row, by layer, [L, B].

        They are the means over the row's drafts; 1 without drafts, since verification attends to
        everything.
        """
        nth = jnp.arange(len(self.stats.attended), dtype=jnp.int32)[:, None, None]

        def over_drafts(shares: Float32[Array, "drafts L B"]) -> Float32[Array, "L B"]:
            total = jnp.sum(jnp.where(nth < self.drafted, shares, 0.0), axis=0)
            return jnp.where(self.drafted > 0, total / jnp.maximum(self.drafted, 1), 1.0)

        return StepStats(*map(over_drafts, self.stats))


@program(
    static_argnames=("decoder", "policy", "choose", "drafts", "keep"),
    donate_argnames=("batch",),
    sharded=("weights", "batch"),
    out=(SHARDED, REPLICATED),
)
def speculate[Memory: (KVCache, SharedPages)](
    decoder: Decoder,
    policy: Policy,
    choose: ChooseFn,
    drafts: int,
    keep: Callable[[VerificationRound], Any],
    weights: Weights,
    read_only: ReadOnly,
    limits: Rows,
    most: Int32[Array, ""],
    batch: Batch[Memory],
) -> tuple[Batch[Memory], Any]:
    """Runs a round of at most `most` drafts per row, and the due services of the rows.

    Also returns the result of `keep`. `most` is at most `drafts`, the number that programs have
    room for. Row b decodes until it has chosen `limits[b]` tokens in total; `batch.made` has a
    number per row. A round ends at a row's next due maintenance.
    """
    note_trace()
    read_only = read_only._replace(knobs=batch.knobs or None)
    before, period = batch, policy.services.period
    kv = batch.cache.of_rows(None)
    # a full row takes part with one token, so that its overflow is detected
    room = jnp.maximum(kv.layers[0].capacity - kv.positions, 1)
    width = jnp.minimum(jnp.minimum(limits - batch.made, jnp.minimum(most, drafts) + 1), room)
    if period:
        width = jnp.minimum(width, period - (batch.made - 1) % period)
    width = jnp.where(kv.overflow, 0, jnp.maximum(width, 0))
    drafted = jnp.maximum(width - 1, 0)
    first = batch.cache.of_rows(width > 0).positions

    one_draft = partial(one_step, decoder, policy, choose, _of_draft, weights, read_only)
    batch, (guesses, stats) = looped(one_draft, drafts, batch, drafted)

    # the last draft also enters the cache, so that one more token follows if all are accepted
    cache = batch.cache.of_rows(width > 0)
    one = (width > 0).astype(jnp.int32)
    cache = grow(cache, one, 1)
    one = taken(cache, one)
    valid, drafts_end = width * one, cache.positions
    cache = cache._replace(positions=drafts_end + one)
    tokens = jnp.concatenate([before.tokens[None], guesses]).T
    attend = partial(attend_few, stats="page_mass" if policy.services.checked else None)
    hidden, cache, state = recomputed(
        decoder, policy, weights, tokens, valid, cache, batch.state, read_only, attend
    )
    spec = spec_of(cache, decoder.config.num_heads)
    state = keep_inactive(policy, spec, valid > 0, state, batch.state)

    logits = to_logits(decoder, weights, hidden.swapaxes(0, 1))
    followed = jnp.pad(guesses, [(0, 1), (0, 0)])

    def check(so_far: _Verified, active: Bool[Array, "B"]) -> tuple[_Verified, tuple[Rows, Any]]:
        active = so_far.agreed & active
        given = so_far.given, so_far.made, logits[so_far.nth], active
        chosen, logprobs, carry = choose(*given)
        agreed = active & (chosen == followed[so_far.nth])
        newest = jnp.where(active, chosen, so_far.newest)
        made = so_far.made + active
        return _Verified(so_far.nth + 1, agreed, made, newest, carry), (chosen, logprobs)

    none = _Verified(jnp.int32(0), valid > 0, before.made, before.tokens, before.given)
    checked, (chosen, logprobs) = looped(check, drafts + 1, none, valid)

    counts = checked.made - before.made
    cache = _cut(cache, first + counts)
    memory = batch.cache.after(cache, cache.positions - drafts_end)
    if period:
        due = (counts > 0) & ((checked.made - 1) % period == 0)
        state = _maintained_rows(policy, cache, state, read_only, due)
    made = VerificationRound(chosen, logprobs, counts, drafted, stats, cache.overflow, logits)
    after = batch._replace(tokens=checked.newest, cache=memory, state=state)
    return after._replace(given=checked.given, made=checked.made), keep(made)


@program(
    static_argnames=("decoder", "policy", "choose", "count", "keep"),
    donate_argnames=("batch",),
    sharded=("weights", "batch"),
    out=(SHARDED, REPLICATED),
)
def verify_steps[Memory: (KVCache, SharedPages)](
    decoder: Decoder,
    policy: Policy,
    choose: ChooseFn,
    count: int,
    keep: Callable[[VerificationRound], Any],
    weights: Weights,
    read_only: ReadOnly,
    limits: Rows,
    batch: Batch[Memory],
) -> tuple[Batch[Memory], Any]:
    """Runs up to `count` rounds without drafts, and the due services of the rows.

    A round is a dense decode step that also updates the policy's state; only the first one reports
    to `Services.checked`, since reports take time. Also returns the result of `keep` on all rounds
    as one, with n = `count` tokens; limits are as in `speculate`.
    """
    silent = policy._replace(services=policy.services._replace(checked=None))
    reports = int(policy.services.checked is not None)
    results = []
    for kind, most in ((policy, reports), (silent, count - reports)):
        static = decoder, kind, choose, 0, lambda made: made
        of_one = partial(inlined(speculate), *static, weights, read_only, limits, jnp.int32(0))
        if most:
            left = limits - batch.made
            batch, made = looped(lambda batch, _, run=of_one: run(batch), most, batch, left)
            results.append(made)
    each = jax.tree.map(lambda *parts: jnp.concatenate(parts), *results)
    by_token = {name: getattr(each, name)[:, 0] for name in ("tokens", "logprobs", "logits")}
    counts = jnp.sum(each.counts, axis=0)
    no_drafts = jax.tree.map(lambda share: share[0], each.stats)
    made = VerificationRound(
        counts=counts, drafted=each.drafted[0], stats=no_drafts, overflow=each.overflow, **by_token
    )
    return batch, keep(made)


class _Verified(NamedTuple):
    """The carry between verified tokens: the next one, which rows agree, and `Batch`'s fields."""

    nth: Int32[Array, ""]
    agreed: Bool[Array, "B"]
    made: Rows
    newest: Rows
    given: Any


def _of_draft(step: Step) -> tuple[Rows, StepStats]:
    assert step.stats is not None
    return step.tokens, step.stats


def _cut(cache: KVCache, positions: Rows) -> KVCache:
    """Drops the tokens of each row from these positions on."""
    lengths = jnp.broadcast_to(positions[:, None], cache.layers[0].lengths.shape)
    layers = tuple(truncate(layer, lengths) for layer in cache.layers)
    return cache._replace(layers=layers, positions=positions)


def _maintained_rows(
    policy: Policy, cache: KVCache, state: State, read_only: ReadOnly, due: Bool[Array, "B"]
) -> State:
    """Returns the state after the policy's maintenance of the rows that are due.

    Raises:
        ValueError: the maintenance changes the cache, which holds dense attention's K and V.
    """
    view = step_view(cache, read_only)._replace(valid=due.astype(jnp.int32))

    def maintain(state: State) -> State:
        made, after = maintained(policy, policy.services.maintain(state, view))
        both = zip(jax.tree.leaves(after), jax.tree.leaves(view.cache), strict=True)
        if any(new is not old for new, old in both):
            raise ValueError(
                f"policy={policy}: its maintain must not change the cache if dense "
                "attention verifies its drafts"
            )
        return keep_inactive(policy, spec_of(cache, 1), due, made, state)

    return lax.cond(jnp.any(due), maintain, lambda state: state, state)
