"""Chooses the experts of each row, and their weights, by the router's logits."""

from jaxtyping import Array, Float32, Int32

from jsparse.pallas_kernels.checked import checked
from jsparse.pallas_kernels.dispatch import Backend, no_triton, run
from jsparse.pallas_kernels.expert_choice import reference

MAX_EXPERTS = 1024  # that one warp holds
MAX_ROWS = 256  # with more, XLA's choice takes little of the time, and has a gradient


def _load_triton():
    from jsparse.pallas_kernels.expert_choice import triton_gpu

    return triton_gpu.expert_choice


def _triton_refuses(logits: Float32[Array, "R E"], *_: object, **__: object) -> str | None:
    if not 0 < len(logits) <= MAX_ROWS:
        return f"takes 1 to {MAX_ROWS} rows, not {len(logits)}"
    if logits.shape[1] > MAX_EXPERTS:
        return f"takes at most {MAX_EXPERTS} experts, not {logits.shape[1]}"
    return no_triton()


BACKENDS = (
    Backend("triton", _load_triton, _triton_refuses),
    Backend("reference", lambda: reference.expert_choice),
)


@checked()
def expert_choice(
    logits: Float32[Array, "R E"],
    k: int,
    *,
    normalized: bool,
    implementation: str | None = None,
) -> tuple[Int32[Array, "k R"], Float32[Array, "k R"]]:
    """Returns the k experts with the largest logits, best first, and their weights.

    Weights are the experts' shares of the softmax over all E. Of equal logits the first is chosen.
    The kernel has no gradient.

    Args:
        logits: the router's logits.
        k: the number of experts of each row.
        normalized: whether the k weights of a row are divided by their sum.
        implementation: "triton" (1 to 256 rows and at most 1,024 experts), "reference", or None to
            choose.

    Raises:
        ValueError: `k` is not in 1 … E, or the named implementation cannot run here.
    """
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k={k}: must be from 1 to {logits.shape[1]}, the number of experts")
    return run("expert_choice", implementation, BACKENDS, logits, k, normalized=normalized)
