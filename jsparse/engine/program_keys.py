"""Names the programs that an answer needs, or any answer of an engine."""

from collections.abc import Iterable
from itertools import product
from typing import Literal

from jsparse.engine.sizes import EngineSizes
from jsparse.policy import Policy
from jsparse.runtime.program_set import ProgramKey

# How tokens are chosen: all rows take the likeliest; each by its own options; and with the
# likeliest tokens beside the chosen one.
SamplingMode = Literal["greedy", "sampled", "top"]


def answer_keys(
    sizes: EngineSizes, start: int, end: int, new_tokens: int, slot: int, choice: SamplingMode
) -> list[ProgramKey]:
    """Returns the programs of an answer that is alone in the engine.

    Its prompt is read from the token `start` on up to `end`, and it decodes in `slot`.
    """
    keys = [ProgramKey.of("read", size, last=last) for size, last in sizes.chunks(start, end)]
    keys.append(ProgramKey.of("join", choice=choice))
    if new_tokens > 1:
        rows = sizes.rows_for(slot)
        count = sizes.steps if new_tokens > sizes.steps else 1
        keys.append(ProgramKey.of("decode", rows, count=count, choice=choice))
    return keys


def engine_keys(
    sizes: EngineSizes, policy: Policy, choices: Iterable[SamplingMode]
) -> list[ProgramKey]:
    """Returns the keys of all programs for answers with these ways of choosing tokens."""
    keys = [ProgramKey.of("start"), ProgramKey.of("begin")]
    full = {size for _, size in sizes.ladder}
    for size in full | set(sizes.tails):
        for last in (True, False) if size in full else (True,):
            keys.append(ProgramKey.of("read", size, last=last))
        if policy.shares == "keys" and size in full:
            keys.append(ProgramKey.of("replay", size))
    for choice in choices:
        keys.append(ProgramKey.of("join", choice=choice))
        for rows, count in product(sizes.rows, sorted({1, sizes.steps})):
            keys.append(ProgramKey.of("decode", rows, count=count, choice=choice))
    return keys + [ProgramKey.of("service", service=name) for name in policy.services.every]
