"""Finds rows whose prompts share a prefix, so that a decode step reads its pages once for all.

Prefixes consist of whole blocks (`jsparse.engine.blocks`). Equal prompts have the same blocks, so
that rows form a tree.
"""

from collections.abc import Sequence
from itertools import batched, groupby

from jsparse.engine.step_plan import SequenceState, SharedPrefix

# Sharing must save at least this share of the tokens that rows hold, and at least this number of
# tokens: a step with shared prefixes takes two launches per layer instead of one.
MIN_SHARE, MIN_TOKENS = 1 / 4, 16_384


def shared_prefixes(
    seqs: Sequence[SequenceState], count: int, max_rows: int, block_tokens: int
) -> list[SharedPrefix]:
    """Returns the prefixes that save the most reads: up to `count`, of up to `max_rows` rows each.

    Returns [] if they would save too little.
    """
    sharing = [seq for seq in seqs if seq.blocks and seq.blocks[0].references > 1]
    # rows with a common prefix become neighbours
    sharing.sort(key=lambda seq: [block.groups[0] for block in seq.blocks])
    found = [
        SharedPrefix(_common(part) * block_tokens, [seq.slot for seq in part])
        for part in _cut(sharing, max_rows)
    ]
    found = sorted(found, key=_saved, reverse=True)[:count]
    saved, held = sum(map(_saved, found)), sum(len(each.ids) + each.planned for each in seqs)
    return found if saved >= max(MIN_SHARE * held, MIN_TOKENS) else []


def _cut(seqs: Sequence[SequenceState], max_rows: int) -> list[Sequence[SequenceState]]:
    """Splits rows, sorted by their blocks, into sets with a common prefix; some are in none.

    Rows with a longer common prefix stay a set if that saves more than a larger set with a shorter
    prefix.
    """
    if len(seqs) < 2:
        return []
    common = _common(seqs)
    longer = [seq for seq in seqs if len(seq.blocks) > common]
    parts = groupby(longer, key=lambda seq: seq.blocks[common].groups[0])
    groups = [
        group
        for _, part in parts
        for group in _cut(list(part), max_rows)
        if (len(group) - 1) * _common(group) >= len(group) * common
    ]
    members = {seq.number for group in groups for seq in group}
    others = [seq for seq in seqs if seq.number not in members]
    larger = (part for part in batched(others, max_rows) if len(part) > 1 and _common(part))
    return [*groups, *larger]


def _common(seqs: Sequence[SequenceState]) -> int:
    """Returns the number of leading blocks that rows, sorted by their blocks, have in common."""
    pairs = zip(seqs[0].blocks, seqs[-1].blocks, strict=False)
    return next(
        (nth for nth, (a, b) in enumerate(pairs) if a is not b),
        min(len(seqs[0].blocks), len(seqs[-1].blocks)),
    )


def _saved(group: SharedPrefix) -> int:
    """Returns the number of tokens that a set of rows no longer reads once per row."""
    return (len(group.slots) - 1) * group.tokens
