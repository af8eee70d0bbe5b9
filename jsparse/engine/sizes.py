"""Defines EngineSizes, the static sizes of an engine, and the rules of its scheduler."""

import operator
from collections.abc import Callable
from typing import Literal, NamedTuple

# the most prompts that are partly prefilled; each has a place on the device for its newest queries
MAX_PREFILLS = 8
# longer chunks are padded by at most an eighth
PADDED_FREELY = 2048

# How tokens are chosen: greedily in all rows; by each row's options; or by these, and the likeliest
# tokens are returned as well.
SamplingMode = Literal["greedy", "sampled", "top"]


class EngineSizes(NamedTuple):
    """The static sizes of an engine.

    Attributes:
        num_slots: the most requests that decode together, B.
        max_model_len: the maximum context length: prompt and completion together.
        page_size: the number of tokens per page.
        num_groups: the number of page groups; the last one is scratch.
        ladder: the sizes of prefill chunks, as (position, size) pairs: a size applies from its
            position on.
        tails: the sizes that a prompt's last chunk may be padded to, besides those of the ladder.
        block_tokens: the number of tokens per block that requests share.
        steps: the most decode steps per program.
        rows: the numbers of rows of decode programs, ascending to num_slots.
        prefill_rows: the numbers of prompts in prefill programs, ascending from 1.
        max_stall_ms: the most milliseconds between two tokens of a row during prefill, if chunks
            are small enough; a decode program takes at most half of it. None: unlimited.
        batch_invariant: whether the starts of chunks depend on position alone, so that another
            request with the same prompt would compute the same K and V, bit for bit.
        growth_tokens: the number of tokens for which a sequence is allocated memory at a time.
        packed_tokens: the largest chunk size of which one program prefills several; a larger chunk
            keeps a device busy alone.
        prefix_rows: the most rows that read the pages of a shared prefix together; 0: each row
            reads its own.
        drafts: the most tokens that the policy drafts per verification round, for each number of
            rows; (): none.
        adapts: whether fewer are drafted if that is faster.
        evicted_pages: the pages per head of decoding rows, if the policy evicts: prompts are
            compressed into groups of their own before their first token is chosen. 0: prompts
            decode in the groups of their prefill.
        prompt_pages: the numbers of pages per head, ascending, for which programs compress prompts.
        host_blocks: the number of blocks that fit in host memory.
        tail_tokens: if K and V are in host memory, the number of decoded tokens after which a row's
            newest tokens are copied there; 0: K and V are on the device.
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
    host_blocks: int = 0
    tail_tokens: int = 0

    @property
    def full_sizes(self) -> list[int]:
        """The sizes of chunks that other chunks may follow, the largest first."""
        return sorted({size for _, size in self.ladder}, reverse=True)

    @property
    def service_rows(self) -> int:
        """The number of rows of service programs.

        It is 1 if rows have tails, since a program copies them.
        """
        return 1 if self.tail_tokens else self.rows[0]

    def chunk_size(self, position: int) -> int:
        """Returns the size of the chunk that starts at a position."""
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
        """Returns the number of tokens in the next chunk of `start` to `end`, and its padded size.

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
        """Returns the chunks of the tokens from `start` to `end`, as (size, last)."""
        chunks = []
        while start < end:
            valid, size = self.next_chunk(start, end, self.chunk_size(start))
            start += valid
            chunks.append((size, start == end))
        return chunks

    def of_rows(self, *places: int) -> "EngineSizes":
        """Returns the sizes with only the numbers of rows at these indices, and their drafts."""
        drafts = tuple(self.drafts[at] for at in places) if self.drafts else ()
        return self._replace(rows=tuple(self.rows[at] for at in places), drafts=drafts)

    def rows_for(self, count: int) -> int:
        """Returns the number of rows of the smallest decode program for `count` rows."""
        return next(rows for rows in self.rows if rows >= count)

    def pages_for(self, prompt: int) -> int:
        """Returns the pages per head of the program that compresses a prompt of `prompt` tokens."""
        return next(pages for pages in self.prompt_pages if pages >= self.groups_for(prompt))

    def drafts_for(self, rows: int) -> int | None:
        """Returns the most drafts per row in a round of `rows` rows; None: nothing is drafted."""
        return dict(zip(self.rows, self.drafts, strict=True))[rows] if self.drafts else None

    def prefixes(self, rows: int) -> tuple[int, int]:
        """Returns the most shared prefixes in a program of `rows` rows, and the rows of each."""
        return max(1, rows // 4), min(rows, self.prefix_rows)

    def hit_end(self, tokens: int) -> int:
        """Returns the number of tokens that a request can reuse if `tokens` tokens are cached."""
        if self.batch_invariant:
            return self.chunk_start(tokens)
        return tokens // self.block_tokens * self.block_tokens

    @property
    def growth(self) -> int:
        """The number of groups that are allocated to a sequence at a time."""
        return self.groups_for(self.growth_tokens)

    @property
    def row_groups(self) -> int:
        """The most groups that a decoding sequence can have."""
        return self.evicted_pages or self.groups_for(self.max_model_len)

    def groups_for(self, tokens: int) -> int:
        """Returns the number of groups for `tokens` tokens."""
        return -(-tokens // self.page_size)

    @property
    def block_groups(self) -> int:
        """The number of groups of a block."""
        return self.block_tokens // self.page_size

    def blocks_for(self, groups: int) -> int:
        """Returns the number of blocks for `groups` groups."""
        return -(-groups // self.block_groups)


class Rules(NamedTuple):
    """The traits of a policy that the scheduler needs.

    Attributes:
        root: the policy, on which K and V depend besides the tokens; None: nothing may be shared.
        window: the number of last prompt tokens that each request must prefill itself.
        replays: whether shared K and V are replayed to build a row's state.
        periods: the numbers of decoded tokens after which a program services a row.
        shares_generated: whether K, V and the policy's state of generated tokens equal those of a
            prompt with these tokens, so that they can be shared, as after verification rounds.
        slots: a function (prompt, new) that returns the most slots per head, in tokens.
    """

    root: str | None
    window: int
    replays: bool
    periods: tuple[int, ...]
    shares_generated: bool = False
    slots: Callable[[int, int], int] = operator.add
