"""Appends new tokens to a 4-bit copy of K."""

from jaxtyping import Array, Float, Int32

from jsparse.cache import LayerCache
from jsparse.cache.key_constants import KeyFrame
from jsparse.pallas_kernels.checked import checked
from jsparse.pallas_kernels.dispatch import Backend, no_triton, run
from jsparse.pallas_kernels.int4_append import reference
from jsparse.pallas_kernels.int4_keys import Int4Keys, check_frame
from jsparse.shapes import Lengths, Rows


def _load_triton():
    from jsparse.pallas_kernels.int4_append import triton_gpu

    return triton_gpu.int4_append


BACKENDS = (
    Backend("triton", _load_triton, lambda *_, **__: no_triton()),
    Backend("reference", lambda: reference.int4_append),
)


@checked()
def int4_append(
    keys: Int4Keys,
    layer: LayerCache,
    k: Float[Array, "B T K width"],
    valid: Rows,
    first: Lengths,
    *,
    frame: KeyFrame | None = None,
    channels: Int32[Array, "B K r"] | None = None,
    implementation: str | None = None,
) -> Int4Keys:
    """Appends the first `valid[b]` of row b's T tokens, from each head's slot `first` on.

    The arguments are those of `cache.write`, which must have stored the same tokens. Only its rows
    are written, and a rewritten slot has its newest token. Pools are updated in place if the
    caller's jit donates them, and copied first otherwise.

    Args:
        keys: the 4-bit copy before the call.
        layer: the cache's layer with its pages allocated, for page locations and the dtype of K;
            its K and V are not read.
        k: the tokens, in all H channels.
        valid: the number of valid tokens in each row.
        first: the slot of each head's first new token.
        frame: the frame of the copy; None: K as it is.
        channels: the channels in `keys`, each in [0, H); None: all, in order.
        implementation: "triton", "reference", or None to choose.

    Raises:
        ValueError: shapes do not match.
    """
    name, given = ("k", k) if channels is None else ("channels", channels)
    if given.shape[-1] != (width := 2 * keys.packed.shape[-1]):
        raise ValueError(f"{name}.shape={given.shape}: must have the keys' {width} channels")
    check_frame(k.shape[-1], layer, frame)
    return run(
        "int4_append",
        implementation,
        BACKENDS,
        keys,
        layer,
        k,
        valid,
        first,
        frame=frame,
        channels=channels,
    )
