"""Attends causally among a few new tokens, and merges with their attention to earlier tokens."""

from jaxtyping import Array, Float, Float32

from jsparse.pallas_kernels.checked import check_dtypes, checked
from jsparse.pallas_kernels.dispatch import Backend, no_triton, run
from jsparse.pallas_kernels.new_token_attention import reference

MAX_TOKENS = 64  # a program holds all new K and V of a KV head


def _triton():
    from jsparse.pallas_kernels.new_token_attention import triton_gpu

    return triton_gpu.new_token_attention


def _not_triton(q: Float[Array, "B T N H"], *_, **__) -> str | None:
    if q.shape[1] > MAX_TOKENS:
        return f"takes at most {MAX_TOKENS} tokens, not {q.shape[1]}"
    return no_triton()


BACKENDS = (
    Backend("triton", _triton, _not_triton),
    Backend("reference", lambda: reference.new_token_attention),
)


@checked()
def new_token_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    past_o: Float32[Array, "B K rows H"],
    past_lse: Float32[Array, "B K rows"],
    *,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """Attends from T new tokens to earlier tokens and, causally, to each other.

    Args:
        q: the new tokens' queries, after RoPE; the factor of q·k is 1/√H.
        k: their keys, after RoPE.
        v: their values.
        past_o: attention of each query to its earlier tokens, by KV head: row t·G + g is that of
            the group's query g of token t.
        past_lse: the logsumexp of the same; -inf if there is no earlier token.
        implementation: "triton" (one launch), "reference", or None to choose.

    Raises:
        ValueError: shapes or dtypes differ, or the named implementation cannot run here.
    """
    check_dtypes(q=q, k=k, v=v)
    rows = q.shape[1] * q.shape[2] // k.shape[2]
    if past_o.shape[2] != rows:
        raise ValueError(
            f"past_o.shape={past_o.shape}: must have {rows} rows per KV head, one for each query"
        )
    return run("new_token_attention", implementation, BACKENDS, q, k, v, past_o, past_lse)
