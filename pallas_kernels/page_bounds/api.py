"""Scores pages by an upper bound of their tokens' logits; Quest ranks pages by it."""

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
    """Scores every page by the largest logit that any token in it could have, for any query head.

    With mid the centre and half the half-width of a page's key range, the score is
        sm_scale · max over the group of (q·mid + slack · |q|·half),
    or the same for the group's mean query, without the maximum.

    With a slack of 1 this is Σ_d max(q_d · high_d, q_d · low_d), the bound from "Quest: Query-Aware
    Sparsity for Efficient Long-Context LLM Inference" (Tang et al., arXiv:2406.10774): up to
    float32 rounding no token of the page scores higher, ignoring the layer's bias. A smaller slack
    gives no bound, but ranks pages better. In a frame, mid and half are those of the stored bounds,
    and the parentheses contain
        (q · key_scale)·mid + slack · |q · key_scale|·half + q·R(span)·mid_of_the_frame.

    Args:
        q: the queries, after RoPE.
        layer: the cache's layer, for page locations and lengths; its K and V are not read.
        bounds: the minimum and maximum keys of every page, in K's dtype or in 8 bits, rounded
            outward.
        frame: the frame of 8-bit bounds; None: K as it is.
        slack: the fraction of half that counts, from 0 to 1.
        group: "max" for the largest score of a group's queries, "mean" for the score of their mean,
            rounded to their dtype.
        sm_scale: the factor of the logits, above 0; None: 1/√H.
        implementation: "triton", "reference", or None to choose.

    Returns:
        float32[B, K, M] by logical page; -inf for pages without tokens.

    Raises:
        ValueError: shapes do not match, bounds in K's dtype have a frame, slack is not from 0 to 1,
            `group` is unknown, or sm_scale is not above 0.
    """
    check_frame(bounds, layer, frame)
    if not 0 <= slack <= 1:
        raise ValueError(f"slack={slack}: must be a number from 0 to 1")
    if sm_scale is not None and not sm_scale > 0:
        raise ValueError(
            f"sm_scale={sm_scale}: must be above 0, or a bound of q·k does not bound the logit"
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
