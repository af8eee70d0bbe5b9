"""Chooses an engine's sizes by its options, its policy and the device's memory."""

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

# With an 8B model on an H100, chunks of 512 tokens at a prompt's beginning keep the device as busy
# as longer ones. Further on, attention gains by longer ones, the longest of which take too long
# where rows decode beside them. Of a model whose matrices take less than BUSY operations for 512
# tokens, chunks are longer: a program keeps the host busy for several milliseconds.
# Without flash attention scores are stored, and chunks are smaller; on a CPU all have the smallest
# size, since compiling a program takes longer than reading a short prompt.
LADDER = ((0, 512), (4096, 2048))
UNHURRIED_LADDER = (*LADDER, (8192, 8192))
SMALL_LADDER = ((0, 2048), (8192, 8192))
PLAIN_LADDER, CPU_LADDER = ((0, 512),), ((0, chunk_attention.MIN_CHUNK),)
TAILS = (64, 256, 512, 1024)
BUSY = 2e12
BLOCK_TOKENS = 512
# A step computes all rows of its program, whether or not they hold requests. Programs of few rows
# and of all are enough: on a GPU the smaller is hardly faster for fewer rows than this; on a CPU a
# step of one row takes a quarter of the time that eight take.
FEW_ROWS_GPU, FEW_ROWS_CPU = 8, 1
ROWS_CPU = 8
# Tokens of an answer for which it gets memory at a time.
GROWTH_TOKENS = 256
# The pages per head of the smallest program that compresses prompts; each larger one has four times
# as many.
PROMPT_PAGES = 128
# Groups that leave the device, or come back, at a time: 134 MB of an 8B model.
MOVED_GROUPS = 64
# A GPU has room for several short chunks at a time.
PACKED_GPU = 8


def on_gpu() -> bool:
    """Returns whether the engine runs on a GPU."""
    return jax.default_backend() == "gpu"


def cache_spec(
    params: Params, options: EngineOptions, most_rows: int = DeviceRows.MOST_ROWS
) -> CacheSpec:
    """Returns the sizes of an engine's rows, of which a GPU has `most_rows` by default.

    Raises:
        ValueError: an argument is out of its range.
    """
    gpu, longest = on_gpu(), params.config.max_position_embeddings
    asked = options.max_model_len
    if asked is not None and asked > longest:
        raise ValueError(f"max_model_len={asked}: must be at most {longest}, the model's maximum")
    tokens = asked or (longest if gpu else min(longest, 2048))
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
        default = PLAIN_LADDER if gpu else CPU_LADDER
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
        host_groups=_host_groups(options.swap_space, memory),
        moved_groups=MOVED_GROUPS,
        tail_tokens=memory.tail_tokens,
    )


def evicted_pages(policy: Policy, rows: CacheSpec, max_model_len: int) -> int:
    """Returns the most pages per head of rows that decode, where a policy evicts; 0 if none do."""
    if policy.eviction is None:
        return 0
    if policy.eviction.after_prompt is None:  # which would cut the state
        return rows.num_pages
    prompts, slots = range(1, max_model_len), bound(policy)
    most = max((slots(prompt, max_model_len - prompt) for prompt in prompts), default=1)
    return -(-most // rows.page_size)


def bound(policy: Policy) -> Callable[[int, int], int]:
    """Returns the most slots of a head, behind a prompt of so many tokens and so many new ones."""
    if policy.eviction is None or policy.eviction.after_prompt is None:
        return operator.add
    slots = max_length(policy)
    return lambda prompt, new: min(slots(prompt, new), prompt + new)


def prefix_rows(asked: bool | None, policy: Policy, spec: CacheSpec) -> int:
    """Returns the most rows that read together what they have in common; 0 is that none do."""
    if asked is None:
        heads, layers = spec.model_kv_heads, range(spec.num_layers)
        dense = sum(len(policy.dense_heads(layer, heads)) == heads for layer in layers)
        asked = on_gpu() and 2 * dense >= spec.num_layers
    rows = MAX_QUERIES * spec.num_kv_heads // spec.num_heads
    return min(rows, spec.batch) if asked and rows > 1 else 0


def _host_groups(swap_space: float, rows: DeviceRows) -> int:
    """Returns the groups whose pages fit into so many GiB of host memory."""
    nbytes, there = swap_space * 2**30, available_host_bytes()
    if nbytes > there:
        limit = f", as {LIMIT_VARIABLE} allows," if on_gpu() else ""
        raise ValueError(
            f"swap_space={swap_space}: must be at most {there / 2**30:.1f}, the GiB of host memory "
            f"that are free{limit} now"
        )
    return int(nbytes / group_bytes(rows)[0]) if nbytes else 0


def _prompt_pages(policy: Policy, spec: CacheSpec) -> tuple[int, ...]:
    """Returns the pages per head for which there are programs that compress prompts.

    Where the policy has a number per slot, they are all of those that rows may have.
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
    asked: Sequence[int] | None, slots: int, *, on_gpu: bool, some: bool
) -> tuple[int, ...]:
    """Returns the numbers of rows of decode programs; all rows alone unless there are `some`."""
    if asked is None and not some:
        return (slots,)
    if asked is None:
        few = FEW_ROWS_GPU if on_gpu else FEW_ROWS_CPU
        doubled = itertools.takewhile(lambda n: n < slots, (few << i for i in itertools.count()))
        return (*(doubled if on_gpu else [few] * (few < slots)), slots)
    rows = _rising("decode_rows", asked)
    if rows[-1] != slots:
        raise ValueError(f"decode_rows={asked!r}: must rise up to max_num_seqs={slots}")
    return rows


def _prefill_rows(asked: Sequence[int] | None, slots: int, *, packs: bool) -> tuple[int, ...]:
    """Returns the numbers of prompts of programs that read them, by default some if it `packs`."""
    if asked is None:
        return tuple(sorted({1, min(PACKED_GPU, slots) if packs else 1}))
    rows = _rising("prefill_rows", asked)
    maximum = min(MAX_PREFILLS, slots)
    if rows[0] != 1 or rows[-1] > maximum:
        raise ValueError(f"prefill_rows={asked!r}: must rise from 1 to at most {maximum}")
    return rows


def _rising(name: str, asked: Sequence[int]) -> tuple[int, ...]:
    rows = tuple(asked) if isinstance(asked, Sequence) else ()
    for number in rows:
        whole_number(name, number, 1)
    if not rows or list(rows) != sorted(set(rows)):
        raise ValueError(f"{name}={asked!r}: must be numbers that rise")
    return rows


def _require_ladder(ladder: tuple[tuple[int, int], ...], block: int, page_size: int) -> None:
    positions = [at for at, _ in ladder]
    if not ladder or positions[0] != 0 or positions != sorted(set(positions)):
        raise ValueError(f"ladder={ladder}: positions must begin at 0 and rise")
    for at, size in ladder:
        below = next((own for first, own in reversed(ladder) if first < at), size)
        if size < 1 or size % block or size % page_size or at % size or at % below:
            raise ValueError(
                f"ladder={ladder}: sizes must be multiples of {block} and of "
                f"page_size={page_size}, and positions multiples of the sizes beside them"
            )
