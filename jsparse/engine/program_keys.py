"""Names the programs that an answer needs, or any answer of an engine."""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Literal

from jsparse.engine.sizes import EngineSizes
from jsparse.policy import Policy
from jsparse.runtime.program_set import ProgramKey

# How tokens are chosen: all rows take the likeliest; each by its own options; and with the
# likeliest tokens beside the chosen one.
SamplingMode = Literal["greedy", "sampled", "top"]


def evict_key(pages: int) -> ProgramKey:
    """Returns the key of the program that compresses a prompt of up to so many pages per head."""
    return ProgramKey.of("evict", 1, pages)


PARK, RESUME = ProgramKey.of("park", 1), ProgramKey.of("resume", 1)
REFILL, LEAVE = ProgramKey.of("refill", 1), ProgramKey.of("leave", 1)


def answer_keys(
    sizes: EngineSizes,
    start: int,
    end: int,
    new_tokens: int,
    rows: int,
    choice: SamplingMode,
) -> list[ProgramKey]:
    """Returns the programs of an answer whose prompt is read alone.

    The prompt is read from the token `start` on up to `end`, and the answer decodes in a program
    that has `rows` rows at least.
    """
    keys = [ProgramKey.of("read", 1, size, last=last) for size, last in sizes.chunks(start, end)]
    if sizes.evicted_pages:
        keys.append(evict_key(sizes.pages_for(end)))
    keys += [REFILL] if sizes.tail_tokens else []
    keys.append(ProgramKey.of("join", 1, choice=choice))
    if new_tokens > 1:
        rows = sizes.rows_for(rows)
        keys.append(decode_key(choice, rows, drafts=sizes.drafts_for(rows)))
    keys += [LEAVE] if 0 < sizes.tail_tokens < new_tokens else []
    return keys


def engine_keys(
    sizes: EngineSizes, policy: Policy, choices: Sequence[SamplingMode]
) -> list[ProgramKey]:
    """Returns the keys of all programs for answers with these ways of choosing tokens.

    Rows then read what they have in common each for itself.
    """
    keys = [ProgramKey.of("start")]
    # these take longest
    for rows, choice in product(sizes.rows, choices):
        keys.append(decode_key(choice, rows, drafts=sizes.drafts_for(rows)))
    keys += service_keys(sizes, policy)
    full = sizes.full_sizes
    for rows in sizes.prefill_rows:
        for size in {*full, *sizes.tails}:
            if rows > 1 and size > sizes.packed_tokens:
                continue
            for last in (True, False) if size in full else (True,):
                keys.append(ProgramKey.of("read", rows, size, last=last))
    keys += map(evict_key, sizes.prompt_pages)
    keys += [PARK, RESUME] if sizes.host_groups else []
    keys += [REFILL, LEAVE] if sizes.tail_tokens else []
    if policy.shares == "keys":
        keys += [ProgramKey.of("replay", 1, size) for size in full]
    for choice in choices:
        keys += [ProgramKey.of("join", rows, choice=choice) for rows in sizes.prefill_rows]
    return keys


def service_keys(sizes: EngineSizes, policy: Policy) -> list[ProgramKey]:
    """Returns the keys of the programs that serve rows between their steps."""
    if sizes.drafts:  # a round has its services within
        return []
    rows = sizes.service_rows
    return [ProgramKey.of("service", rows, service=name) for name in policy.services.every]


def decode_key(choice: SamplingMode, *size: int, drafts: int | None = None) -> ProgramKey:
    """Returns the key of a program that decodes.

    The size is the number of rows; for rows that read together what they have in common, it is
    followed by the most families and the most rows of each. With `drafts`, it is of a round of
    speculation that has room for as many; else of decode steps.
    """
    if drafts is None:
        return ProgramKey.of("decode", *size, choice=choice)
    return ProgramKey.of("round", *size, choice=choice, drafts=drafts)


def decode_keys(
    choices: Iterable[SamplingMode], *size: int, drafts: int | None = None
) -> list[ProgramKey]:
    """Returns such keys, for these ways of choosing tokens."""
    return [decode_key(choice, *size, drafts=drafts) for choice in choices]
