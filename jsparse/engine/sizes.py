"""Defines EngineSizes, the static sizes of an engine, and the rules of its scheduler."""

import operator
from collections.abc import Callable
from typing import Literal, NamedTuple

# prompts that may be partly read at a time; each has a place for its newest queries on the device
MAX_PREFILLS = 8
# chunks of more tokens are padded by no more than an eighth
PADDED_FREELY = 2048

# How tokens are chosen: all rows take the likeliest; each by its own options; and with the
# likeliest tokens beside the chosen one.
SamplingMode = Literal["greedy", "sampled", "top"]


class EngineSizes(NamedTuple):
    """Holds the static sizes of an engine.

    Attributes:
        num_slots: the most requests that decode together, B.
        max_model_len: the most tokens of prompt and sequence together.
        page_size: the number of tokens per page.
        num_groups: the number of groups of pages, of which the last is scratch.
        ladder: the sizes of prompt chunks, as (position, size) pairs: the size counts from that
            position on.
        tails: the sizes that a prompt's last chunk may be padded to, beside those of the ladder.
        block_tokens: the number of tokens per block that requests share.
        steps: the most decode steps per program.
        rows: the numbers of rows for which decode programs are made, rising up to num_slots.
        prefill_rows: the numbers of prompts that a program may read a chunk of, rising from 1.
        max_stall_ms: the time between two tokens of a row while prompts are read, as far as chunks
            are small enough, and that of two decode programs; None is any time.
        batch_invariant: whether the starts of chunks depend on position alone, so that another
            request with the same prompt would compute the same K and V, bit for bit.
        growth_tokens: the tokens of a sequence for which it gets memory at a time.
        packed_tokens: the largest chunks of which a program reads several; larger ones keep a
            device busy alone.
        prefix_rows: the most rows that read the pages that they have in common together; 0 is that
            each row reads its own.
        drafts: the most tokens that the policy drafts before dense attention checks them, in rounds
            of each number of rows; empty if there are none.
        adapts: whether fewer are drafted where that is faster.
        evicted_pages: the pages per head of rows that decode, where a policy evicts: prompts are
            compressed into groups of their own before their first token is chosen; 0 is that they
            decode in the groups that they were read into.
        prompt_pages: the numbers of pages per head, rising, for which there are programs that
            compress prompts of as many.
        host_groups: the number of groups that fit in host memory, for sequences swapped out.
        moved_groups: the groups of a part of a sequence's pages that is moved at a time.
        tail_tokens: where K and V lie in host memory, the number of decoded tokens after which a
            row's newest leave for it; 0 is that they lie on the device.
    """

    num_slots: int
    max_model_len: int
    page_size: int
    num_groups: int
    ladder: tuple[tuple[int, int], ...]
    tails: tuple[int, ...]
    block_tokens: int
    steps: int
    rows: tuple[int, ...]
    prefill_rows: tuple[int, ...] = (1,)
    max_stall_ms: float | None = None
    batch_invariant: bool = False
    growth_tokens: int = 256
    packed_tokens: int = 512
    prefix_rows: int = 0
    drafts: tuple[int, ...] = ()
    adapts: bool = False
    evicted_pages: int = 0
    prompt_pages: tuple[int, ...] = ()
    host_groups: int = 0
    moved_groups: int = 1
    tail_tokens: int = 0

    @property
    def full_sizes(self) -> list[int]:
        """The sizes of chunks that may be followed by others, the largest first."""
        return sorted({size for _, size in self.ladder}, reverse=True)

    @property
    def service_rows(self) -> int:
        """The number of rows of the programs that serve rows between their steps.

        Where rows have tails, these are copied.
        """
        return 1 if self.tail_tokens else self.rows[0]

    def chunk_size(self, position: int) -> int:
        """Returns the size of the chunk that begins at a position."""
        return next(size for first, size in reversed(self.ladder) if position >= first)

    def chunk_start(self, position: int) -> int:
        """Returns the last start of a chunk at or before a position."""
        first, size = next(step for step in reversed(self.ladder) if position >= step[0])
        return first + (position - first) // size * size

    def padded(self, tokens: int, position: int) -> int:
        """Returns the size to which a chunk of `tokens` at a position is padded."""
        maximum = self.chunk_size(position)
        sizes = {size for _, size in self.ladder} | set(self.tails)
        return min(size for size in sizes if tokens <= size <= maximum)

    def next_chunk(self, start: int, end: int, maximum: int) -> tuple[int, int]:
        """Returns how many of the tokens from `start` to `end` a chunk reads, and its size.

        `maximum` is the largest size that it may have.
        """
        valid = min(maximum, end - start)
        size = self.padded(valid, start)
        wasteful = size > PADDED_FREELY and size - valid > size // 8
        if wasteful and not self.batch_invariant:
            smaller = (each for each in self.full_sizes if each < size)
            size = next(smaller, size)
            valid = min(valid, size)
        return valid, size

    def chunks(self, start: int, end: int) -> list[tuple[int, bool]]:
        """Returns the chunks that tokens from `start` to `end` are read in, as (size, last)."""
        chunks = []
        while start < end:
            valid, size = self.next_chunk(start, end, self.chunk_size(start))
            start += valid
            chunks.append((size, start == end))
        return chunks

    def of_rows(self, *places: int) -> "EngineSizes":
        """Returns the sizes with the numbers of rows at these places alone, and their drafts."""
        drafts = tuple(self.drafts[at] for at in places) if self.drafts else ()
        return self._replace(rows=tuple(self.rows[at] for at in places), drafts=drafts)

    def rows_for(self, count: int) -> int:
        """Returns the rows of the smallest decode program that has this many."""
        return next(rows for rows in self.rows if rows >= count)

    def pages_for(self, prompt: int) -> int:
        """Returns the pages per head of the program that compresses a prompt of so many tokens."""
        return next(pages for pages in self.prompt_pages if pages >= self.groups_for(prompt))

    def drafts_for(self, rows: int) -> int | None:
        """Returns the most drafts of each row in a round of `rows`; None if nothing is drafted."""
        return dict(zip(self.rows, self.drafts, strict=True))[rows] if self.drafts else None

    def prefixes(self, rows: int) -> tuple[int, int]:
        """Returns the most shared prefixes in a program of `rows` rows, and the rows of each."""
        return max(1, rows // 4), min(rows, self.prefix_rows)

    def hit_end(self, tokens: int) -> int:
        """Returns where the tokens end that a request may take over of as many that are known."""
        if self.batch_invariant:
            return self.chunk_start(tokens)
        return tokens // self.block_tokens * self.block_tokens

    @property
    def growth(self) -> int:
        """The number of groups that a sequence gets at a time."""
        return self.groups_for(self.growth_tokens)

    @property
    def row_groups(self) -> int:
        """The most groups that a sequence that decodes can hold."""
        return self.evicted_pages or self.groups_for(self.max_model_len)

    def groups_for(self, tokens: int) -> int:
        """Returns the number of groups that hold this many tokens."""
        return -(-tokens // self.page_size)


class Rules(NamedTuple):
    """Holds the traits of a policy that the scheduler needs.

    Attributes:
        root: the policy, on which K and V depend beside the tokens; None if nothing may be shared.
        window: the last tokens of a prompt that must be read by the request itself.
        replays: whether a row's state must be built anew from K and V that are shared.
        periods: numbers of decoded tokens after which a row is serviced, by a program of its own.
        shares_generated: whether K, V and the policy's state of generated tokens equal those of a
            prompt with these tokens, so that they can be shared. After verification rounds they
            always do.
        slots: returns the most slots of a head, in tokens, behind a prompt of so many tokens and so
            many new ones.
    """

    root: str | None
    window: int
    replays: bool
    periods: tuple[int, ...]
    shares_generated: bool = False
    slots: Callable[[int, int], int] = operator.add
