"""Finds rows that have the first blocks of their prompts in common.

A decode step then reads these pages once for all rows of a family. Blocks are those of
`jsparse.engine.blocks`: equal prompts have the same ones, so that rows form a tree by them.
"""

from collections.abc import Sequence
from itertools import batched, groupby

from jsparse.engine.step_plan import Answer, Family

# What is read once must be at least this part of all that the rows hold, and so many tokens: a step
# of families takes two launches per layer instead of one.
MIN_SHARE, MIN_TOKENS = 1 / 4, 16_384


def families(
    answers: Sequence[Answer], count: int, max_rows: int, block_tokens: int
) -> list[Family]:
    """Returns up to `count` families of up to `max_rows` rows, those that save most reads.

    There are none if they do not save enough to be worth while.
    """
    sharing = [answer for answer in answers if answer.blocks and answer.blocks[0].holders > 1]
    # rows that begin alike come together
    sharing.sort(key=lambda answer: [block.groups[0] for block in answer.blocks])
    found = [
        Family(_common(part) * block_tokens, [answer.slot for answer in part])
        for part in _cut(sharing, max_rows)
    ]
    found = sorted(found, key=_saved, reverse=True)[:count]
    saved, held = sum(map(_saved, found)), sum(len(each.ids) + each.sent for each in answers)
    return found if saved >= max(MIN_SHARE * held, MIN_TOKENS) else []


def _cut(answers: Sequence[Answer], max_rows: int) -> list[Sequence[Answer]]:
    """Cuts rows in the order of their blocks into families; some rows are in none.

    Those that have more in common than all stay a family if it saves more than they would save as
    members of a larger one.
    """
    if len(answers) < 2:
        return []
    common = _common(answers)
    longer = [answer for answer in answers if len(answer.blocks) > common]
    parts = groupby(longer, key=lambda answer: answer.blocks[common].groups[0])
    families = [
        family
        for _, part in parts
        for family in _cut(list(part), max_rows)
        if (len(family) - 1) * _common(family) >= len(family) * common
    ]
    members = {answer.number for family in families for answer in family}
    others = [answer for answer in answers if answer.number not in members]
    larger = (part for part in batched(others, max_rows) if len(part) > 1 and _common(part))
    return [*families, *larger]


def _common(answers: Sequence[Answer]) -> int:
    """Returns the number of first blocks that rows in the order of their blocks have in common."""
    pairs = zip(answers[0].blocks, answers[-1].blocks, strict=False)
    return next(
        (nth for nth, (a, b) in enumerate(pairs) if a is not b),
        min(len(answers[0].blocks), len(answers[-1].blocks)),
    )


def _saved(family: Family) -> int:
    """Returns the number of tokens that a family's rows need not read, each for itself."""
    return (len(family.slots) - 1) * family.tokens
