"""Scores pages by how much a token of theirs could score: Quest ranks pages by it."""

from typing import Literal

from jaxtyping import Array, Float, Float32

from jsparse.cache import LayerCache
from jsparse.cache.key_constants import KeyFrame
from jsparse.pallas_kernels.checked import checked
from jsparse.pallas_kernels.dispatch import Backend, no_triton, run
from jsparse.pallas_kernels.key_bounds import Bounds, PageBounds, PageBounds8, check_frame
from jsparse.pallas_kernels.page_bounds import reference

GroupQueries = Literal["mean", "max"]


def _values_refused(q: Array, layer: LayerCache, bounds: PageBounds, **_: object) -> str | None:
    if q.dtype != bounds.high.dtype:
        return f"takes queries of the bounds' dtype, {bounds.high.dtype}, not {q.dtype}"
    return no_triton()


def _codes_refused(q: Array, layer: LayerCache, bounds: PageBounds8, **_: object) -> str | None:
    if q.dtype.itemsize != 2:
        return f"takes queries that float16 can hold, bfloat16 or float16, not {q.dtype}"
    if q.shape[2] % 2:
        return f"takes an even head dimension, not {q.shape[2]}"
    return no_triton()


def _load_triton():
    from jsparse.pallas_kernels.page_bounds import triton_gpu

    return triton_gpu.page_bounds


def _load_triton_codes():
    from jsparse.pallas_kernels.page_bounds import codes_triton

    return codes_triton.page_bounds


_REFERENCE = Backend("reference", lambda: reference.page_bounds)
BACKENDS = {
    PageBounds: (Backend("triton", _load_triton, _values_refused), _REFERENCE),
    PageBounds8: (Backend("triton", _load_triton_codes, _codes_refused), _REFERENCE),
}


@checked()
def page_bounds(
    q: Float[Array, "B N H"],
    layer: LayerCache,
    bounds: Bounds,
    *,
    frame: KeyFrame | None = None,
    slack: float = 1.0,
    group: GroupQueries = "max",
    sm_scale: float | None = None,
    implementation: str | None = None,
) -> Float32[Array, "B K M"]:
    """Scores every page by the greatest logit that a token in it could have, for any query head.

    With mid and half the middle and half the range of a page's keys, the score is

        sm_scale · max over the group of (q·mid + slack · |q|·half),

    or, without the maximum, that of the group's mean query.

    With a slack of 1 this is Σ_d max(q_d · high_d, q_d · low_d), the bound from "Quest: Query-Aware
    Sparsity for Efficient Long-Context LLM Inference" (Tang et al., arXiv:2406.10774): up to
    float32 rounding no token of the page scores more, the layer's bias left aside. With less it
    bounds nothing, and ranks pages better. In a frame, mid and half are those of what is kept, and
    the parentheses hold

        (q · key_scale)·mid + slack · |q · key_scale|·half + q·R(span)·mid_of_the_frame.

    Args:
        q: the queries, after RoPE.
        layer: the cache's layer, for where pages lie and how many slots each head holds; its K and
            V are not read.
        bounds: the least and greatest keys of every page, in K's dtype or, rounded outward, in 8
            bits.
        frame: the frame that 8-bit bounds are kept in; None where it is K's own.
        slack: the part of half the range that counts, from 0 to 1.
        group: "max" for the greatest score of a group's queries, "mean" for the score of their
            mean, rounded to their dtype.
        sm_scale: the factor of the logits, above 0; None is 1/√H.
        implementation: "triton", "reference", or None to pick.

    Returns:
        float32[B, K, M] by logical page; -inf for pages that hold no token.

    Raises:
        ValueError: shapes do not fit together, bounds in K's dtype are given a frame, slack is not
            from 0 to 1, there is no such `group`, or sm_scale is not above 0.
    """
    check_frame(bounds, layer, frame)
    if not 0 <= slack <= 1:
        raise ValueError(f"slack={slack}: must be a number from 0 to 1")
    if sm_scale is not None and not sm_scale > 0:
        raise ValueError(
            f"sm_scale={sm_scale}: must be above 0, or what bounds q·k does not bound the logit"
        )
    sm_scale = q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)
    return run(
        "page_bounds",
        implementation,
        BACKENDS[type(bounds)],
        q,
        layer,
        bounds,
        frame=frame,
        slack=float(slack),
        group=group,
        sm_scale=sm_scale,
    )
