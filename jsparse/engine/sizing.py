"""Chooses an engine's sizes from its options, its policy and the device's memory."""

import itertools
import operator
from collections.abc import Callable, Sequence

import jax

from jsparse.cache import CacheSpec
from jsparse.engine.host_rows import memory_kind
from jsparse.engine.options import EngineOptions
from jsparse.engine.pool_size import group_bytes, pool_groups
from jsparse.engine.row_memory import DeviceRows
from jsparse.engine.sizes import MAX_PREFILLS, EngineSizes
from jsparse.hyper_parameters import whole_number
from jsparse.models.checkpoint import Params
from jsparse.models.config import ModelConfig
from jsparse.pallas_kernels.block_sparse_decode.api import MAX_QUERIES
from jsparse.policy import Policy
from jsparse.runtime import capacity, chunk_attention
from jsparse.runtime.host_store import LIMIT_VARIABLE, available_host_bytes
from jsparse.runtime.room import max_length

# With an 8B model on an H100, chunks of 512 tokens at the start of a prompt keep the device as busy
# as longer chunks do. Further on, attention gains from longer chunks, but the longest ones stall
# decoding too much. If a model's matrices take fewer than BUSY operations for 512 tokens, chunks
# are longer, since each program keeps the host busy for several milliseconds. Without flash
# attention, scores are stored, and chunks are smaller. On a CPU all chunks have the smallest size,
# since compiling a program takes longer than the prefill of a short prompt.
LADDER = ((0, 512), (4096, 2048))
UNHURRIED_LADDER = (*LADDER, (8192, 8192))
SMALL_LADDER = ((0, 2048), (8192, 8192))
PLAIN_LADDER = ((0, 512),)
TAILS = (64, 256, 512, 1024)
BUSY = 2e12
BLOCK_TOKENS = 512
# A step computes all rows of its program, whether or not they hold requests. Programs of few rows
# and of all rows suffice: on a GPU, fewer rows than this are hardly faster; on a CPU, a step of one
# row takes a quarter of the time of eight.
FEW_ROWS_GPU, FEW_ROWS_CPU = 8, 1
ROWS_CPU = 8
# Tokens for which a sequence is allocated memory at a time.
GROWTH_TOKENS = 256
# The pages per head of the smallest program that compresses prompts; each larger one has four times
# as many.
PROMPT_PAGES = 128
# Blocks of host memory that are left free for copies in flight and for gaps: XLA's allocator of
# pinned memory grows by regions, each twice as large as the last; part of a block is left in each.
SPARE_BLOCKS = 24
# The most short chunks that a GPU prefills at a time.
PACKED_GPU = 8


def on_gpu() -> bool:
    """Returns whether the engine runs on a GPU."""
    return jax.default_backend() == "gpu"


def cache_spec(
    params: Params, options: EngineOptions, most_rows: int = DeviceRows.MOST_ROWS
) -> CacheSpec:
    """Returns the sizes of an engine's rows; a GPU has `most_rows` of them by default.

    Raises:
        ValueError: an argument is out of its range.
    """
    gpu, longest = on_gpu(), params.config.max_position_embeddings
    limit = options.max_model_len
    if limit is not None and limit > longest:
        raise ValueError(f"max_model_len={limit}: must be at most {longest}, the model's maximum")
    tokens = limit or (longest if gpu else min(longest, 2048))
    rows = options.max_num_seqs or (most_rows if gpu else ROWS_CPU)
    return capacity.cache_spec(params, [[]] * rows, [0] * rows, tokens, options.page_size)


def sizes_of(
    policy: Policy,
    config: ModelConfig,
    spec: CacheSpec,
    options: EngineOptions,
    *,
    steps: int,
) -> EngineSizes:
    """Returns an engine's sizes; a decode program has at most `steps` steps.

    Raises:
        ValueError: an option is out of its range, or memory does not suffice.
    """
    gpu = on_gpu()
    flash = chunk_attention.has_flash(spec.head_dim, spec.dtype)
    if not flash:
        smallest = ((0, chunk_attention.min_chunk(policy.prefill_method)),)
        default = PLAIN_LADDER if gpu else smallest
    elif 2 * config.num_layers * config.layer_weights * LADDER[0][1] < BUSY:
        default = SMALL_LADDER
    else:
        default = UNHURRIED_LADDER if options.max_stall_ms is None else LADDER
    longest = options.max_model_len or spec.capacity
    default = tuple(rung for rung in default if rung[0] < longest)
    try:
        rungs = tuple((at, size) for at, size in options.ladder or default)
    except (TypeError, ValueError):
        raise ValueError(f"ladder={options.ladder!r}: must be (position, size) pairs") from None
    kept = evicted_pages(policy, spec, longest)
    decoding = spec._replace(num_pages=kept or spec.num_pages)
    memory = memory_kind(policy)(policy, spec, decoding)
    block = min(BLOCK_TOKENS, min(size for _, size in rungs))
    _require_ladder(rungs, block, spec.page_size)
    prompts = _prefill_rows(options.prefill_rows, spec.batch, packs=gpu and memory.PACKS)
    return EngineSizes(
        num_slots=spec.batch,
        max_model_len=longest,
        page_size=spec.page_size,
        num_groups=pool_groups(
            memory,
            options,
            prompts=prompts[-1],
            chunk=max(*(size for _, size in rungs), prompts[-1] * default[0][1]),
        ),
        ladder=rungs,
        tails=tuple(size for size in TAILS if size < max(size for _, size in rungs)),
        block_tokens=block,
        steps=steps,
        rows=_decode_rows(options.decode_rows, spec.batch, on_gpu=gpu, some=memory.DECODES_SOME),
        prefill_rows=prompts,
        max_stall_ms=options.max_stall_ms,
        batch_invariant=options.batch_invariant,
        prefix_rows=prefix_rows(options.cascade_attention, policy, spec),
        growth_tokens=GROWTH_TOKENS,
        packed_tokens=default[0][1],
        evicted_pages=kept,
        prompt_pages=_prompt_pages(policy, spec) if kept else (),
        host_blocks=_host_blocks(options.kv_offloading_size, memory, block // spec.page_size),
        tail_tokens=memory.tail_tokens,
    )


def evicted_pages(policy: Policy, rows: CacheSpec, max_model_len: int) -> int:
    """Returns the most pages per head of decoding rows if the policy evicts, otherwise 0."""
    if policy.eviction is None:
        return 0
    if policy.eviction.after_prompt is None:  # nothing shrinks the state
        return rows.num_pages
    prompts, slots = range(1, max_model_len), bound(policy)
    most = max((slots(prompt, max_model_len - prompt) for prompt in prompts), default=1)
    return -(-most // rows.page_size)


def bound(policy: Policy) -> Callable[[int, int], int]:
    """Returns a function (prompt, new) that returns the most slots per head."""
    if policy.eviction is None or policy.eviction.after_prompt is None:
        return operator.add
    slots = max_length(policy)
    return lambda prompt, new: min(slots(prompt, new), prompt + new)


def prefix_rows(cascade: bool | None, policy: Policy, spec: CacheSpec) -> int:
    """Returns the most rows that read a shared prefix together; 0: none do."""
    if cascade is None:
        heads, layers = spec.model_kv_heads, range(spec.num_layers)
        dense = sum(len(policy.dense_heads(layer, heads)) == heads for layer in layers)
        cascade = on_gpu() and 2 * dense >= spec.num_layers
    rows = MAX_QUERIES * spec.num_kv_heads // spec.num_heads
    return min(rows, spec.batch) if cascade and rows > 1 else 0


def _host_blocks(gib: float, rows: DeviceRows, block_groups: int) -> int:
    """Returns the number of blocks of `block_groups` groups that fit in `gib` of host memory."""
    if not gib:
        return 0
    nbytes, block = gib * 2**30, group_bytes(rows)[0] * block_groups
    free = max(available_host_bytes() - SPARE_BLOCKS * block, 0)
    if nbytes > free:
        limit = f" and that {LIMIT_VARIABLE} allows" if on_gpu() else ""
        raise ValueError(
            f"kv_offloading_size={gib}: must be at most {free / 2**30:.1f}, the GiB of host memory "
            f"that are free now{limit}"
        )
    if nbytes < block:
        raise ValueError(
            f"kv_offloading_size={gib}: must be 0 or at least {block / 2**30:.2g}, the GiB of a "
            "block"
        )
    return int(nbytes / block)


def _prompt_pages(policy: Policy, spec: CacheSpec) -> tuple[int, ...]:
    """Returns the pages per head for which programs compress prompts.

    If the policy's state depends on the number of pages, that is only the most that rows can have.
    """

    def state(pages: int) -> list[tuple[int, ...]]:
        made = jax.eval_shape(lambda: policy.init(spec._replace(num_pages=pages)))
        return [leaf.shape for leaf in jax.tree.leaves(made)]

    few = itertools.takewhile(
        lambda pages: pages < spec.num_pages, (PROMPT_PAGES << 2 * i for i in itertools.count())
    )
    full = state(spec.num_pages)
    return (*(pages for pages in few if state(pages) == full), spec.num_pages)


def _decode_rows(
    given: Sequence[int] | None, slots: int, *, on_gpu: bool, some: bool
) -> tuple[int, ...]:
    """Returns the numbers of rows of decode programs; only that of all rows unless `some`."""
    if given is None and not some:
        return (slots,)
    if given is None:
        few = FEW_ROWS_GPU if on_gpu else FEW_ROWS_CPU
        doubled = itertools.takewhile(lambda n: n < slots, (few << i for i in itertools.count()))
        return (*(doubled if on_gpu else [few] * (few < slots)), slots)
    rows = _ascending("decode_rows", given)
    if rows[-1] != slots:
        raise ValueError(f"decode_rows={given!r}: must ascend to max_num_seqs={slots}")
    return rows


def _prefill_rows(given: Sequence[int] | None, slots: int, *, packs: bool) -> tuple[int, ...]:
    """Returns the numbers of prompts in prefill programs; by default only 1 unless it `packs`."""
    if given is None:
        return tuple(sorted({1, min(PACKED_GPU, slots) if packs else 1}))
    rows = _ascending("prefill_rows", given)
    maximum = min(MAX_PREFILLS, slots)
    if rows[0] != 1 or rows[-1] > maximum:
        raise ValueError(f"prefill_rows={given!r}: must ascend from 1 to at most {maximum}")
    return rows


def _ascending(name: str, given: Sequence[int]) -> tuple[int, ...]:
    rows = tuple(given) if isinstance(given, Sequence) else ()
    for number in rows:
        whole_number(name, number, 1)
    if not rows or list(rows) != sorted(set(rows)):
        raise ValueError(f"{name}={given!r}: must be numbers in ascending order")
    return rows


def _require_ladder(ladder: tuple[tuple[int, int], ...], block: int, page_size: int) -> None:
    positions = [at for at, _ in ladder]
    if not ladder or positions[0] != 0 or positions != sorted(set(positions)):
        raise ValueError(f"ladder={ladder}: positions must start at 0 and ascend")
    for at, size in ladder:
        below = next((smaller for first, smaller in reversed(ladder) if first < at), size)
        if size < 1 or size % block or size % page_size or at % size or at % below:
            raise ValueError(
                f"ladder={ladder}: sizes must be multiples of {block} and of "
                f"page_size={page_size}, and each position of its size and the one before"
            )
