"""Implements `api.expert_choice` in jax-triton: one warp per row."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float32, Int32


def expert_choice(
    logits: Float32[Array, "R E"], k: int, *, normalized: bool
) -> tuple[Int32[Array, "k R"], Float32[Array, "k R"]]:
    """Implements `api.expert_choice`."""
    from jsparse.pallas_kernels.triton_call import triton_call

    rows, experts = logits.shape
    return triton_call(
        logits,
        kernel=choice_kernel,
        out_shape=[
            jax.ShapeDtypeStruct((k, rows), jnp.int32),
            jax.ShapeDtypeStruct((k, rows), jnp.float32),
        ],
        grid=(rows,),
        num_warps=1,
        N=experts,
        PADDED=triton.next_power_of_2(experts),
        CHOSEN=k,
        CHOSEN_PADDED=triton.next_power_of_2(k),
        NORMALIZED=normalized,
    )


@triton.jit
def choice_kernel(
    logits_ptr,  # [rows, N]
    chosen_ptr,  # [CHOSEN, rows]
    weights_ptr,  # [CHOSEN, rows]
    N: tl.constexpr,
    PADDED: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHOSEN_PADDED: tl.constexpr,
    NORMALIZED: tl.constexpr,
):
    """Takes the largest logit of those left, CHOSEN times."""
    row, rows = tl.program_id(0), tl.num_programs(0)
    expert = tl.arange(0, PADDED)
    logits = tl.load(logits_ptr + row * N + expert, mask=expert < N, other=float("-inf"))
    shares = tl.exp(logits - tl.max(logits, 0))
    total = tl.sum(shares, 0)
    nth = tl.arange(0, CHOSEN_PADDED)
    experts = tl.zeros((CHOSEN_PADDED,), tl.int32)
    weights = tl.zeros((CHOSEN_PADDED,), tl.float32)
    left = expert < N
    for i in range(CHOSEN):
        best = tl.max(tl.where(left, logits, float("-inf")), 0)
        # the first of equal logits; PADDED, which is no expert, in a row with NaN
        here = tl.min(tl.where(left & (logits == best), expert, PADDED), 0)
        share = tl.sum(tl.where(expert == here, shares, 0.0), 0)
        experts = tl.where(nth == i, here, experts)
        weights = tl.where(nth == i, share, weights)
        left = left & (expert != here)
    weights = weights / (tl.sum(weights, 0) if NORMALIZED else total)
    at = nth * rows + row
    tl.store(chosen_ptr + at, experts, mask=nth < CHOSEN)
    tl.store(weights_ptr + at, weights, mask=nth < CHOSEN)
