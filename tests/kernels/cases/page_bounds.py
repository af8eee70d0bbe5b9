"""Cases of `page_bounds` and `bounds_append`, from the `Case` of block_sparse_decode."""

from collections import namedtuple
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jsparse.cache import LayerCache
from jsparse.cache.key_constants import KeyFrame
from jsparse.pallas_kernels.bounds_append import bounds_append
from jsparse.pallas_kernels.key_bounds import Bounds, PageBounds, PageBounds8
from tests.kernels.cases.block_sparse_decode import JUNK, Case, frame_around

Inputs = namedtuple("Inputs", "q layer bounds")


@dataclass(frozen=True)
class Codes(Case):
    """A call with 8-bit bounds."""


def frame_for(case: Case, seed: int = 0) -> KeyFrame:
    """A frame with a few large constant channels, as in keys of Qwen2."""
    rng, half = np.random.default_rng(seed), case.head_dim // 2
    mid = rng.normal(size=(case.kv_heads, case.head_dim))
    mid[:, half - 2 : half] *= 100
    return frame_around(case, rng, mid, 10000.0)


def build(case: Case, seed: int = 0, *, frame: KeyFrame | None = None) -> Inputs:
    """Builds the inputs; empty pages have bounds of ±JUNK."""
    q, layer, _ = case.build(seed)
    return Inputs(q, layer, _bounds(case, layer, frame))


@partial(jax.jit, static_argnames="case")
def _bounds(case: Case, layer: LayerCache, frame: KeyFrame | None) -> Bounds:
    """The bounds of all tokens of the heads."""
    junk = jnp.full((layer.k.shape[0], layer.k.shape[2]), JUNK, layer.k.dtype)
    form = PageBounds8 if isinstance(case, Codes) else PageBounds
    everything = jnp.full(case.batch, case.slots, jnp.int32)
    return bounds_append(
        form.of(junk, -junk),
        layer,
        everything,
        jnp.zeros_like(layer.lengths),
        max_new=case.slots,
        frame=frame,
        implementation="reference",
    )


_whole = partial(Case, dense="all", listed="none", capacity=0)
_codes = partial(Codes, dense="all", listed="none", capacity=0, dtype="bfloat16")

CASES = (
    _whole("ragged"),
    _whole("full", lengths="full", num_pages=41),
    _whole("one_token", lengths="one"),
    _whole("scrambled", table="scrambled", num_pages=35),
    _whole("shared_pages", table="shared", batch=3, lengths="full"),
    _whole("head_dim_40", head_dim=40, group=3, page_size=24, num_pages=3),
    _whole("head_dim_96", head_dim=96, group=3, page_size=8),
    _whole("head_dim_256", head_dim=256, group=16, page_size=64, num_pages=2),
    _whole("group_of_7", group=7, kv_heads=4, batch=3, table="scrambled"),
    _whole("sm_scale", sm_scale=0.3),
    _whole("bfloat16", dtype="bfloat16", head_dim=128, num_pages=33),
    _codes("codes", head_dim=128, num_pages=33),
    _codes("codes_scrambled", table="scrambled", num_pages=35),
    _codes("codes_shared_pages", table="shared", batch=3, lengths="full"),
    _codes("codes_head_dim_40", head_dim=40, group=3, page_size=24, num_pages=3),
    _codes("codes_group_of_7", group=7, kv_heads=4, batch=3, table="scrambled"),
    _codes("codes_huge_logits", spread=1e4),
)
INT8_CASES = (
    _whole("int8", int8=True, table="scrambled", num_pages=35),
    _codes("codes_int8", int8=True, head_dim=40, page_size=24, num_pages=3),
)
