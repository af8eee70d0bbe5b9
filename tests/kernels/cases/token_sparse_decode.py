"""Cases of `token_sparse_decode`: those of `block_sparse_decode`, with lists of tokens."""

from functools import partial

from tests.kernels.cases.block_sparse_decode import Case

_case = partial(Case, granularity="token")

CASES = (
    _case("tokens"),
    _case("few_listed", capacity=5, num_pages=9),
    _case("all_listed", listed="all"),
    _case("nothing_listed", listed="none", capacity=7),
    _case("empty_list", listed="none", capacity=0),
    _case("newest_only", listed="newest", capacity=3),
    _case("newest_unlisted", listed="first", lengths="full", capacity=3),
    _case("one_token", lengths="one"),
    _case("head_dim_96", head_dim=96, group=3, page_size=8),
    _case("head_dim_256", head_dim=256, group=16, page_size=64, num_pages=2),
    _case("dense_and_sparse", dense="mixed", capacity=20),
    _case("all_dense", dense="all", listed="none", capacity=0),
    _case("scrambled", table="scrambled", bias=True),
    _case("shared_pages", table="shared", batch=3),
    _case("sm_scale", sm_scale=0.3),
    _case("huge_logits", spread=1e4),
    _case("bfloat16", dtype="bfloat16", table="scrambled"),
    _case("bfloat16_96", dtype="bfloat16", head_dim=96, group=1, dense="mixed"),
    _case(
        "bfloat16_256",
        dtype="bfloat16",
        head_dim=256,
        group=16,
        kv_heads=1,
        page_size=64,
        num_pages=2,
    ),
    _case("long_lists", num_pages=24, table="scrambled"),
    _case("long_lists_of_all", num_pages=24, listed="all", dense="mixed"),
    _case("int8", int8=True, table="scrambled", bias=True),
    _case("int8_dense", int8=True, dense="mixed", dtype="bfloat16", capacity=20),
    _case("int8_long_lists", int8=True, num_pages=24, dtype="bfloat16", group=7),
)
