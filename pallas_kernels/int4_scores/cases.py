"""Builds the inputs that tests and benchmarks share, from the `Case` of block_sparse_decode."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp

from jsparse.cache import LayerCache
from jsparse.pallas_kernels.block_sparse_decode.cases import Case
from jsparse.pallas_kernels.int4_keys import Int4Keys, quantise
from jsparse.selection import Selection


class Inputs(NamedTuple):
    """Holds the op's arguments."""

    q: jnp.ndarray
    layer: LayerCache
    keys: Int4Keys
    selection: Selection | None


@dataclass(frozen=True)
class Narrow(Case):
    """Describes a call with queries and 4-bit keys of the first `channels` channels of K."""

    channels: int = 16


def build(case: Case, seed: int = 0) -> Inputs:
    """Build the inputs; where all heads are dense, no selection is given: everything is scored."""
    q, layer, selection = case.build(seed)
    channels = case.channels if isinstance(case, Narrow) else case.head_dim
    keys = Int4Keys(*quantise(layer.k[..., :channels]))
    return Inputs(q[..., :channels], layer, keys, None if case.dense == "all" else selection)


_whole = partial(Case, dense="all", listed="none", capacity=0)

CASES = (
    _whole("whole"),
    _whole("whole_full", lengths="full", num_pages=37),
    _whole("whole_one_row_one_head", batch=1, kv_heads=1, group=1),
    _whole("whole_one_token", lengths="one"),
    _whole("whole_scrambled", table="scrambled", num_pages=9),
    _whole("whole_shared", table="shared", batch=3),
    _whole("whole_head_dim_96", head_dim=96, group=3, page_size=8),
    _whole("whole_head_dim_256", head_dim=256, group=16, page_size=64, num_pages=2),
    _whole("whole_group_of_7", group=7, kv_heads=4, batch=3, table="scrambled"),
    _whole("whole_tiny_pages", page_size=2, num_pages=5),
    _whole("whole_bfloat16", dtype="bfloat16", head_dim=128),
    Narrow("whole_16_of_64_channels", dense="all", listed="none", capacity=0, sm_scale=0.125),
    Narrow(
        "8_of_128_channels",
        head_dim=128,
        channels=8,
        table="scrambled",
        dtype="bfloat16",
        sm_scale=0.09,
    ),
    Case("pages"),
    Case("few_listed", capacity=2, num_pages=9),
    Case("all_listed", listed="all"),
    Case("nothing_listed", listed="none"),
    Case("empty_list", listed="none", capacity=0),
    Case("newest_only", listed="newest"),
    Case("newest_unlisted", listed="first", lengths="full"),
    Case("head_dim_40", head_dim=40, group=3, page_size=8),
    Case("head_dim_128", head_dim=128, group=1, page_size=32, num_pages=3),
    Case("pages_of_128", head_dim=128, page_size=128, num_pages=3),
    Case("bits_8", bits=True, page_size=8),
    Case("bits_16", bits=True, table="scrambled"),
    Case("bits_32", bits=True, page_size=32, listed="all", num_pages=3),
    Case("dense_and_sparse", dense="mixed"),
    Case("scrambled", table="scrambled", num_pages=19),
    Case("shared_pages", table="shared", batch=3),
    Case("sm_scale", sm_scale=0.3),
    Case("bfloat16", dtype="bfloat16", table="scrambled", bits=True),
)
