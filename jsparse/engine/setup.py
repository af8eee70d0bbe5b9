"""Chooses an engine's sizes, and says what it cannot serve."""

from collections.abc import Sequence

import jax

from jsparse.cache import CacheSpec
from jsparse.engine.scheduler import Sizes
from jsparse.models.checkpoint import Params
from jsparse.owners import owners
from jsparse.policy import AnyPolicy, Policy, resolved, whole_number
from jsparse.runtime import capacity, prefill
from jsparse.runtime.constants import require_constants
from jsparse.runtime.session import STEPS_PER_PROGRAM

# Chunks are small enough that those who decode beside them do not wait for long: 0.1 s of an 8B
# model on an H200, at any position. Without flash attention scores are stored: chunks are smaller.
LADDER = ((0, 2048), (16384, 1024), (65536, 512))
PLAIN_LADDER = ((0, 512),)
TAILS = (64, 256)
BLOCK_TOKENS = 512
# A step computes all rows of its program, whether or not they hold requests. Programs of few rows
# and of all are enough: on a GPU the smaller is hardly faster for fewer rows than this; on a CPU a
# step of one row takes a quarter of the time that eight take.
FEW_ROWS_GPU, FEW_ROWS_CPU = 8, 1


def servable(asked: AnyPolicy, spec: CacheSpec, per_request: Sequence[str]) -> Policy:
    """Returns the policy that runs in an engine of these sizes.

    A fallback is left out: it speaks for a whole batch, so that a row would depend on the others.

    Raises:
        ValueError: it cannot be served, or does not let requests set one of `per_request`.
    """
    if isinstance(per_request, str) or not isinstance(per_request, Sequence):
        raise ValueError(f"per_request={per_request!r}: must be a list of names")
    policy = resolved(asked, spec)
    reasons = {
        "evicts tokens, so that heads need different memory": policy.evicts,
        "keeps K and V in host memory": policy.offload is not None,
        "needs other fields of the cache": bool(policy.fields),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(
                f"policy={policy}: must keep all K and V in the engine's pages, but {reason}; "
                "jsparse.generate takes it"
            )
    allowed = {"dense", *policy.per_row}
    for name in per_request:
        if name not in allowed:
            raise ValueError(
                f"per_request={tuple(per_request)}: must be among {sorted(allowed)}, which "
                f"{policy} lets rows set"
            )
    owners(policy, spec)
    return policy._replace(fallback=None)


def cache_spec(
    params: Params, *, max_num_seqs: int | None, max_model_len: int | None, page_size: int
) -> CacheSpec:
    """Returns the sizes of an engine's rows; `Engine` says what None means.

    Raises:
        ValueError: an argument is out of its range.
    """
    on_gpu = jax.default_backend() == "gpu"
    longest = params.config.max_position_embeddings
    for name, value in (("max_num_seqs", max_num_seqs), ("max_model_len", max_model_len)):
        if value is not None:
            whole_number(name, value, 1)
    if max_model_len is not None and max_model_len > longest:
        raise ValueError(
            f"max_model_len={max_model_len}: must be at most {longest}, the model's maximum"
        )
    tokens = max_model_len or (longest if on_gpu else min(longest, 2048))
    rows = max_num_seqs or (64 if on_gpu else 8)
    return capacity.cache_spec(params, [[]] * rows, [0] * rows, tokens, page_size)


def sizes_of(
    params: Params,
    policy: Policy,
    spec: CacheSpec,
    *,
    kv_cache_tokens: int | None,
    gpu_memory_utilization: float,
    steps_per_program: int | None,
    decode_rows: Sequence[int] | None,
    ladder: Sequence[tuple[int, int]] | None,
    max_model_len: int | None,
) -> Sizes:
    """Returns an engine's sizes; `Engine` says what None means.

    Raises:
        ValueError: an argument is out of its range, the policy needs what the model lacks, or
            memory does not suffice.
    """
    require_constants(params, policy)
    if steps_per_program is not None:
        whole_number("steps_per_program", steps_per_program, 1)
    on_gpu = jax.default_backend() == "gpu"
    flash = prefill.has_flash(spec.head_dim, spec.dtype)
    try:
        rungs = tuple((at, size) for at, size in ladder or (LADDER if flash else PLAIN_LADDER))
    except (TypeError, ValueError):
        raise ValueError(f"ladder={ladder!r}: must be (position, size) pairs") from None
    block = min(BLOCK_TOKENS, min(size for _, size in rungs))
    _require_ladder(rungs, block, spec.page_size)
    return Sizes(
        num_slots=spec.batch,
        max_model_len=max_model_len or spec.capacity,
        page_size=spec.page_size,
        num_groups=capacity.pool_groups(spec, policy, kv_cache_tokens, gpu_memory_utilization),
        ladder=rungs,
        tails=tuple(size for size in TAILS if size < rungs[0][1]),
        block_tokens=block,
        steps=steps_per_program or (STEPS_PER_PROGRAM if on_gpu else 1),
        rows=_rows(decode_rows, spec.batch, on_gpu=on_gpu),
    )


def _rows(asked: Sequence[int] | None, slots: int, *, on_gpu: bool) -> tuple[int, ...]:
    """Returns the numbers of rows of decode programs."""
    if asked is None:
        few = FEW_ROWS_GPU if on_gpu else FEW_ROWS_CPU
        return tuple(sorted({min(few, slots), slots}))
    rows = tuple(asked) if isinstance(asked, Sequence) else ()
    for number in rows:
        whole_number("decode_rows", number, 1)
    if not rows or list(rows) != sorted(set(rows)) or rows[-1] != slots:
        raise ValueError(f"decode_rows={asked!r}: must rise up to max_num_seqs={slots}")
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
