"""Appends new tokens to a 4-bit copy of K."""

from jsparse.cache import LayerCache
from jsparse.pallas_kernels.dispatch import Backend, no_triton, run
from jsparse.pallas_kernels.int4_append import reference
from jsparse.pallas_kernels.int4_keys import Int4Keys
from jsparse.shapes import ChunkKV, Lengths, Rows


def _load_triton():
    from jsparse.pallas_kernels.int4_append import triton_gpu

    return triton_gpu.int4_append


BACKENDS = (
    Backend("triton", _load_triton, lambda *_: no_triton()),
    Backend("reference", lambda: reference.int4_append),
)


def int4_append(
    keys: Int4Keys,
    layer: LayerCache,
    k: ChunkKV,
    valid: Rows,
    first: Lengths,
    *,
    implementation: str | None = None,
) -> Int4Keys:
    """Takes in the first `valid[b]` of T tokens, which lie at the slots first, first + 1, … of each
    head of row b.

    Arguments are those of `cache.write`, which must have stored the same tokens: only the rows it
    wrote are written, and a slot written again holds its newest token. `layer` is the cache's
    layer, pages allocated. Pools are changed in place where the caller's jit donates them, and
    copied first where it does not.

    Args:
        keys: as they stood.
        layer: says where pages lie, and of which dtype K is; its K and V are not read.
        k: the tokens, in the channels that `keys` has.
        valid: how many tokens of each row count.
        first: the slot of each head's first one.
        implementation: "triton", "reference", or None to pick.

    Raises:
        ValueError: shapes do not fit together.
    """
    wanted = (*first.shape, 2 * keys.packed.shape[-1])
    if (k.shape[0], *k.shape[2:]) != wanted:
        raise ValueError(
            f"k.shape={k.shape}: [B, K, H] must be {wanted}, to fit `first` and the keys"
        )
    return run("int4_append", implementation, BACKENDS, keys, layer, k, valid, first)
