"""Checks an engine's options and chooses its sizes."""

import itertools
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax

from jsparse.cache import CacheSpec
from jsparse.engine.sizes import MAX_READING, EngineSizes, Rules
from jsparse.host_memory.host_store import LIMIT_VARIABLE, available_host_bytes, stored_every
from jsparse.hyper_parameters import flag, number_in, whole_number
from jsparse.models.checkpoint import Params
from jsparse.models.config import ModelConfig
from jsparse.pallas_kernels.block_sparse_decode.api import MAX_QUERIES
from jsparse.policy import AnyPolicy, Policy, is_dense
from jsparse.runtime import capacity, chunk_attention
from jsparse.runtime.admission import admit
from jsparse.runtime.draft_length import most_drafts
from jsparse.runtime.generate_options import num_drafts
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
# Steps per program on a GPU, if they are short.
STEPS_GPU = 32
# A row whose K and V lie in host memory has half a gigabyte of an 8B model on the device, its tail.
ROWS_GPU, OFFLOADED_ROWS_GPU, ROWS_CPU = 64, 8, 8
# Tokens of an answer for which it gets memory at a time.
GROWTH_TOKENS = 256
# The pages per head of the smallest program that compresses prompts; each larger one has four times
# as many.
PROMPT_PAGES = 128
# Groups that leave the device, or come back, at a time: 134 MB of an 8B model.
MOVED_GROUPS = 64
OFFLOADED = "K and V lie in host memory"
# A GPU has room for several short chunks at a time.
PACKED_GPU = 8


class EngineSpec(NamedTuple):
    """Describes the engine that programs are made for.

    Attributes:
        params, policy: the model and the policy that decodes.
        cache: the sizes of the rows and of the pool of pages that they share.
        sizes: the static sizes of programs and plans.
        knobs: the names of the hyper-parameters that requests may set.
        layer_stats: whether results hold the shares of each layer.
    """

    params: Params
    policy: Policy
    cache: CacheSpec
    sizes: EngineSizes
    knobs: tuple[str, ...]
    layer_stats: bool

    @property
    def decoding(self) -> CacheSpec:
        """The sizes of rows that decode: if the policy evicts, not those of rows that are read."""
        pages = self.sizes.evicted_pages or self.cache.num_pages
        return self.cache._replace(num_pages=pages)

    @property
    def vocab_size(self) -> int:
        """The number of tokens that the model knows."""
        return self.params.config.vocab_size


def engine_spec(
    params: Params,
    policy: AnyPolicy,
    *,
    max_num_seqs: int | None,
    max_model_len: int | None,
    kv_cache_tokens: int | None,
    gpu_memory_utilization: float,
    swap_space: float,
    page_size: int,
    per_request: Sequence[str],
    layer_stats: bool,
    steps_per_program: int | None,
    decode_rows: Sequence[int] | None,
    prefill_rows: Sequence[int] | None,
    ladder: Sequence[tuple[int, int]] | None,
    max_stall_ms: float | None,
    batch_invariant: bool,
    cascade_attention: bool | None,
    exact: bool,
    num_speculative_tokens: int | None,
) -> EngineSpec:
    """Returns the spec of an engine; `LLM` documents the arguments and the meaning of None.

    Raises:
        ValueError: an argument is out of its range, the policy cannot be served, or memory does not
            suffice.
    """
    on_host = isinstance(policy, Policy) and policy.offload is not None
    if max_num_seqs is None and on_host and _on_gpu():
        max_num_seqs = OFFLOADED_ROWS_GPU
    rows = cache_spec(
        params, max_num_seqs=max_num_seqs, max_model_len=max_model_len, page_size=page_size
    )
    flag("batch_invariant", batch_invariant)
    drafts = num_drafts(exact, num_speculative_tokens)
    if batch_invariant and drafts != 0:
        raise ValueError(
            "exact=True: must be False where batch_invariant is true: how many tokens are checked "
            "together depends on when results arrive, and rounding on that"
        )
    if batch_invariant:
        only = partial(_only, "batch_invariant is true")
        steps_per_program = only("steps_per_program", steps_per_program, 1)
        decode_rows = only("decode_rows", decode_rows, [rows.batch])
        prefill_rows = only("prefill_rows", prefill_rows, [1])
        cascade_attention = only("cascade_attention", cascade_attention, False)
    if steps_per_program is None and _on_gpu() and not on_host:
        steps_per_program = STEPS_GPU
    admitted = admit(
        params,
        policy,
        rows,
        rows_join=True,
        per_request=per_request,
        steps_per_program=steps_per_program,
        allocates=False,
        drafts=drafts,
    )
    if params.mesh is not None:
        _only("the model is spread over several devices", "swap_space", swap_space, 0)
    if admitted.drafts:
        cascade_attention = _only("exact is true", "cascade_attention", cascade_attention, False)
    if admitted.policy.offload is not None:
        cascade_attention = _only(OFFLOADED, "cascade_attention", cascade_attention, False)
        _only(OFFLOADED, "swap_space", swap_space, 0)
    sizes = sizes_of(
        admitted.policy,
        params.config,
        rows,
        kv_cache_tokens=kv_cache_tokens,
        gpu_memory_utilization=gpu_memory_utilization,
        steps=admitted.max_steps,
        decode_rows=decode_rows,
        prefill_rows=prefill_rows,
        ladder=ladder,
        max_stall_ms=max_stall_ms,
        max_model_len=max_model_len,
        swap_space=swap_space,
    )
    sizes = sizes._replace(
        batch_invariant=batch_invariant,
        family_rows=_family_rows(cascade_attention, admitted.policy, rows),
        adapts=admitted.adapts,
    )
    if admitted.drafts:
        sizes = sizes._replace(drafts=tuple(_drafts(drafts, rows) for rows in sizes.rows))
    return EngineSpec(
        params,
        admitted.policy,
        cache=pooled(rows, sizes),
        sizes=sizes,
        knobs=tuple(sorted(set(per_request))),
        layer_stats=layer_stats,
    )


def _drafts(asked: int | None, rows: int) -> int:
    """Returns the most drafts of a program of so many rows."""
    return most_drafts(rows, on_gpu=_on_gpu()) if asked is None else asked


def rules(policy: Policy, spec: CacheSpec, sizes: EngineSizes, *, share: bool) -> Rules:
    """Returns the rules by which requests are planned; if `share`, they share prompts."""
    return Rules(
        root=policy.name if share and policy.shares is not None else None,
        window=policy.window,
        replays=policy.shares == "keys",
        periods=tuple(policy.services.every.values()),
        # a decode program adds up in another order than one that reads
        answers=share
        and is_dense(policy, spec)
        and not sizes.batch_invariant
        and not sizes.tail_tokens,  # not all have left the tail
        slots=bound(policy),
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


def require_exact(policy: Policy, spec: CacheSpec, sizes: EngineSizes, exact: bool | None) -> None:
    """Raises ValueError unless an engine can give an answer that asks for `exact`."""
    started = bool(sizes.drafts)
    if exact not in (None, started) and not is_dense(policy, spec):
        raise ValueError(
            f"exact={exact}: must be {started} or None: the engine was started with exact={started}"
        )


def pooled(rows: CacheSpec, sizes: EngineSizes) -> CacheSpec:
    """Returns the sizes of these rows over a pool of the engine's groups of pages."""
    return rows._replace(pool_pages=sizes.num_groups * rows.num_kv_heads)


def cache_spec(
    params: Params, *, max_num_seqs: int | None, max_model_len: int | None, page_size: int
) -> CacheSpec:
    """Returns the sizes of an engine's rows; `Engine` documents the meaning of None.

    Raises:
        ValueError: an argument is out of its range.
    """
    on_gpu = _on_gpu()
    longest = params.config.max_position_embeddings
    for name, value in (("max_num_seqs", max_num_seqs), ("max_model_len", max_model_len)):
        if value is not None:
            whole_number(name, value, 1)
    if max_model_len is not None and max_model_len > longest:
        raise ValueError(
            f"max_model_len={max_model_len}: must be at most {longest}, the model's maximum"
        )
    tokens = max_model_len or (longest if on_gpu else min(longest, 2048))
    rows = max_num_seqs or (ROWS_GPU if on_gpu else ROWS_CPU)
    return capacity.cache_spec(params, [[]] * rows, [0] * rows, tokens, page_size)


def sizes_of(
    policy: Policy,
    config: ModelConfig,
    spec: CacheSpec,
    *,
    kv_cache_tokens: int | None,
    gpu_memory_utilization: float,
    steps: int,
    decode_rows: Sequence[int] | None,
    prefill_rows: Sequence[int] | None,
    ladder: Sequence[tuple[int, int]] | None,
    max_stall_ms: float | None,
    max_model_len: int | None,
    swap_space: float,
) -> EngineSizes:
    """Returns an engine's sizes; `Engine` documents the meaning of None.

    Raises:
        ValueError: an argument is out of its range, or memory does not suffice.
    """
    on_gpu = _on_gpu()
    if max_stall_ms is not None:
        number_in("max_stall_ms", max_stall_ms, "[0, inf)")
    flash = chunk_attention.has_flash(spec.head_dim, spec.dtype)
    if not flash:
        default = PLAIN_LADDER if on_gpu else CPU_LADDER
    elif 2 * config.num_layers * config.layer_weights * LADDER[0][1] < BUSY:
        default = SMALL_LADDER
    else:
        default = UNHURRIED_LADDER if max_stall_ms is None else LADDER
    longest = max_model_len or spec.capacity
    default = tuple(rung for rung in default if rung[0] < longest)
    try:
        rungs = tuple((at, size) for at, size in ladder or default)
    except (TypeError, ValueError):
        raise ValueError(f"ladder={ladder!r}: must be (position, size) pairs") from None
    kept, reading, on_host = evicted_pages(policy, spec, longest), None, policy.offload is not None
    decoding = spec
    if kept:
        decoding, reading = spec._replace(num_pages=kept), spec._replace(batch=MAX_READING)
    block = min(BLOCK_TOKENS, min(size for _, size in rungs))
    _require_ladder(rungs, block, spec.page_size)
    prompts = _prefill_rows(prefill_rows, spec.batch, packs=on_gpu and not on_host)
    return EngineSizes(
        num_slots=spec.batch,
        max_model_len=longest,
        page_size=spec.page_size,
        num_groups=capacity.pool_groups(
            decoding,
            policy,
            kv_cache_tokens,
            gpu_memory_utilization,
            reading=reading,
            prompts=prompts[-1],
            chunk=max(*(size for _, size in rungs), prompts[-1] * default[0][1]),
        ),
        ladder=rungs,
        tails=tuple(size for size in TAILS if size < max(size for _, size in rungs)),
        block_tokens=block,
        steps=steps,
        rows=_decode_rows(decode_rows, spec.batch, on_gpu=on_gpu, all_alone=on_host),
        prefill_rows=prompts,
        max_stall_ms=max_stall_ms,
        growth_tokens=GROWTH_TOKENS,
        packed_tokens=default[0][1],
        evicted_pages=kept,
        prompt_pages=_prompt_pages(policy, spec) if kept else (),
        host_groups=_host_groups(swap_space, decoding, policy),
        moved_groups=MOVED_GROUPS,
        tail_tokens=stored_every(policy.offload, spec.page_size) if policy.offload else 0,
    )


def _host_groups(swap_space: float, spec: CacheSpec, policy: Policy) -> int:
    """Returns the groups whose pages fit into so many GiB of host memory."""
    number_in("swap_space", swap_space, "[0, inf)")
    nbytes, there = swap_space * 2**30, available_host_bytes()
    if nbytes > there:
        limit = f", as {LIMIT_VARIABLE} allows," if _on_gpu() else ""
        raise ValueError(
            f"swap_space={swap_space}: must be at most {there / 2**30:.1f}, the GiB of host memory "
            f"that are free{limit} now"
        )
    return int(nbytes / capacity.group_bytes(spec, policy)) if nbytes else 0


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


def _on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def _only[Value](where: str, name: str, asked: Value | None, only: Value) -> Value:
    if asked is not None and asked != only:
        raise ValueError(f"{name}={asked!r}: must be {only!r} where {where}")
    return only


def _decode_rows(
    asked: Sequence[int] | None, slots: int, *, on_gpu: bool, all_alone: bool
) -> tuple[int, ...]:
    """Returns the numbers of rows of decode programs; only those of all rows with `all_alone`.

    Others copy what rows have of their own, as tails.
    """
    if asked is None and all_alone:
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
    maximum = min(MAX_READING, slots)
    if rows[0] != 1 or rows[-1] > maximum:
        raise ValueError(f"prefill_rows={asked!r}: must rise from 1 to at most {maximum}")
    return rows


def _family_rows(asked: bool | None, policy: Policy, spec: CacheSpec) -> int:
    """Returns the most rows that read together what they have in common; 0 is that none do."""
    if asked is None:
        heads, layers = spec.model_kv_heads, range(spec.num_layers)
        dense = sum(len(policy.dense_heads(layer, heads)) == heads for layer in layers)
        asked = _on_gpu() and 2 * dense >= spec.num_layers
    else:
        flag("cascade_attention", asked)
    rows = MAX_QUERIES * spec.num_kv_heads // spec.num_heads
    return min(rows, spec.batch) if asked and rows > 1 else 0


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
