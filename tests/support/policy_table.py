"""TABLE lists every registered method at several hyper-parameters, for the battery.

A new method only adds its expressions here. The default run takes those of MECHANISMS, but for the
one that evicts, through the battery, the slow tests all of TABLE. METHODS run through the tests
that need separate programs: the first expression of each method, and those of FURTHER, whose
behaviour no other has. Budgets are small against prompts of 9 to 37 tokens and pages of 8, so that
each expression leaves out some tokens; and their periods against 12 steps.
"""

import ast
import inspect
from collections.abc import Sequence
from typing import Any

from jsparse.policies import POLICIES
from jsparse.policies.expressions import parse
from jsparse.policy import Policy

TABLE = (
    "dense()",
    "streaming(sink=4, recent=8)",
    "streaming(sink=0, recent=1)",
    "all_pages()",
    "quest(budget=16)",
    "quest(budget=16, slack=1.0, group='max')",
    "quest(budget=8, bounds_dtype='uint8')",
    "quest_chunks(budget=12, recent=3, lengths=(1, 3), period=2)",
    "quest_chunks(12, 'fixed', 1.0, 'max', sink=1, recent=1, lengths=(1, 2), period=3)",
    "double_sparsity(budget=8)",
    "double_sparsity(budget=16, channels=6, granularity='page')",
    "keep(double_sparsity(budget=4, channels=16), sink=2, recent=5)",
    "tidal(budget=8, first=0, again=5, sink=1, recent=3)",
    "tidal(budget=3, first=0, again=5, correct_every=4)",
    "tidal(budget=8, first=0, again=5, sink=1, recent=3, heads='each')",
    "lychee_decode(((1, 1), (0, 1)), value=24, sink=1, recent=6)",
    "lychee_decode(((1, 1), (0, 0)), value=3, granularity='token', correct_every=4)",
    "lychee_decode(((1, 1), (1, 0)), rule='top_p', value=0.6, sink=1, recent=2)",
    "lychee_decode(((1, 1), (0, 0)), rule='threshold', value=0.05, granularity='token', recent=5)",
    "lychee_decode(((1, 1), (0, 0)), rule='ratio', value=0.7)",
    "duo_attention(((1, 1), (0, 1)), sink=1, recent=6)",
    "razor_attention(((1, 0), (0, 0)), sink=2, recent=5, share=0.4)",
    "seer_attention(budget=32, block=16)",
    "seer_attention(threshold=0.4, block=16)",
    "lfps(budget=0.3)",
    "lfps(budget=0.25, decay=0.5, exact=True)",
    "lfps(budget=0.2, candidates='threshold', exact=True, a=0.3)",
    "lfps(budget=0.2, candidates='threshold', exact=True, floor=True)",
    "lfps(budget=0.2, bypass=True)",
    "lfps(budget=0.2, decay=0.2, bypass='mean')",
    "twilight(lfps(budget=0.4), p=0.7, prune='token')",
    "lychee_cluster(budget=12, sink=1, recent=3, lengths=(1, 3), period=2)",
    "lychee_cluster(budget=14, sink=0, recent=3, lengths=(2, 3), period=3, rank='bound', levels=2)",
    "lychee_cluster(budget=8, sink=1, recent=1, lengths=(2, 2), period=1, normalise=False)",
    "twilight(lychee_cluster(14, sink=1, recent=1, lengths=(2, 2), period=2), prune='token')",
    "dense_layers(lychee_cluster(budget=12, sink=1, recent=2, lengths=(2, 3), period=2), n=1)",
    "cluster_kv(budget=9, cluster_size=4, sink=1, recent=3, period=3)",
    "arkvale(budget=16)",
    "arkvale(budget=8, volume='ball')",
    "magic_pig(bits=2, tables=3, sink=1, recent=3, limit=0.9)",
    "magic_pig(bits=9, tables=40, sink=0, recent=1, limit=0.05)",
    "retrieval_heads(magic_pig(bits=2, tables=2, recent=3), ((1, 0), (0, 1)))",
    "dense_layers(magic_pig(bits=3, tables=4, recent=3), n=1)",
    "shadow_kv(budget=6, rank=12, chunk=3, outliers=1, recent=2)",
    "shadow_kv(budget=4, rank=100, chunk=4, outliers=2, recent=1)",
    "dense_layers(shadow_kv(budget=4, rank=20, chunk=2, outliers=1, recent=3), n=1)",
    "retrieval_heads(quest(budget=16), ((0, 1), (1, 0)))",
    "retrieval_heads(lfps(budget=0.2, bypass=True), ((1, 1), (0, 1)))",
    "offloaded(quest(budget=16), tail=8)",
    "offloaded(lfps(budget=0.3), tail=8)",
    "offloaded(magic_pig(bits=2, tables=3, sink=1, recent=3), tail=8)",
    "offloaded(shadow_kv(budget=6, rank=12, chunk=3, outliers=1, recent=2), tail=8)",
    "offloaded(seer_attention(budget=32, block=16), tail=16)",
    "offloaded(lychee_cluster(budget=12, sink=1, recent=3, lengths=(1, 3), period=2), tail=16)",
    "offloaded(razor_attention(((1, 0), (0, 1)), sink=1, recent=4, share=0.0), tail=8)",
    "sparse_prefill(quest(budget=16), 'xattention(threshold=0.5)')",
    "oracle_top_k(budget=8)",
    "oracle_top_k(budget=16, granularity='page')",
    "oracle_top_p(p=0.7)",
    "oracle_top_p(p=0.9, granularity='page')",
    "keep(oracle_top_k(budget=4), sink=2, recent=5)",
    "keep(dense(), sink=4, recent=4)",
    "dense_layers(keep(oracle_top_k(budget=8, granularity='page'), sink=3, recent=3), n=1)",
    "twilight(all_pages(), p=0.6)",
    "twilight(all_pages(), p=0.6, dense_below=20)",
    "twilight(quest(budget=24), p=0.8, prune='token')",
    "twilight(tidal(budget=12, first=0, again=5, recent=4), p=0.8, prune='token')",
    "twilight(double_sparsity(budget=12), p=0.8, prune='token')",
    "twilight(lychee_decode(((1, 1), (0, 1)), value=24), p=0.6)",
    "twilight(lychee_decode(((1, 1), (0, 0)), value=12, granularity='token'), p=0.6)",
    "verified(budget=16, recent=3)",
    "twilight(verified(budget=24, recent=3), p=0.8)",
    "snapkv(budget=8, window=4, pool=3)",
    "snapkv(budget=3, window=2, pool=5, pooling='max')",
    "ada_kv(budget=8, window=4, pool=3)",
    "ada_kv(budget=6, window=1, pooling='mean', floor=0.5, cap=2)",
    "expected_attention(budget=8, sink=1, recent=2, window=6)",
    "kvzip(budget=8, sink=1, recent=2, chunk=16)",
    "h2o(budget=8, window=4, period=6)",
    "r_kv(budget=8, window=4, period=6)",
    "raas(budget=8, threshold=0.05, period=6)",
    "hard_kv(budget=8, floor=7, cap=12, period=6, window=4, sink=2)",
    "hard_kv(budget=8, floor=1, cap=12, period=4, window=4, sink=0, metric='snapkv', merge=False)",
    "hard_kv(budget=9, period=5, window=4, sink=1, metric='r_kv', budgets='uniform')",
    "hard_kv(floor=7, cap=12, p=0.5, period=6, window=3, sink=2, metric='h2o', budgets='n_star')",
    "hard_kv(floor=7, cap=14, p=0.7, period=4, window=4, sink=2, budgets='calibrated')",
    "hard_kv(floor=7, cap=14, p=0.6, period=5, window=3, sink=2, budgets='union', merge=False)",
    "hard_kv(budget=8, floor=7, cap=12, period=5, window=4, sink=2, patience=2)",
)


def firsts(expressions: Sequence[str]) -> dict[str, str]:
    """Returns the first expression of each method, by the method's name."""
    return {outermost(expression): expression for expression in reversed(expressions)}


# one expression for each kind of selection: pages, sets handed on, pruning, eviction
MECHANISMS = (
    "quest(budget=16)",
    "lychee_decode(((1, 1), (0, 1)), value=24, sink=1, recent=6)",
    "twilight(all_pages(), p=0.6)",
    "hard_kv(budget=8, floor=7, cap=12, period=6, window=4, sink=2)",
)


def outermost(expression: str) -> str:
    """Returns the name of the method that an expression builds, the wrapper's if there is one."""
    node = ast.parse(expression, mode="eval").body
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


# each has a separate path through its method, which no first expression takes
FURTHER = (
    "quest(budget=8, bounds_dtype='uint8')",
    "double_sparsity(budget=16, channels=6, granularity='page')",
    "lychee_decode(((1, 1), (0, 0)), value=3, granularity='token', correct_every=4)",
    "lychee_decode(((1, 1), (1, 0)), rule='top_p', value=0.6, sink=1, recent=2)",
    "lfps(budget=0.2, candidates='threshold', exact=True, floor=True)",
    "lfps(budget=0.2, bypass=True)",
    "lychee_cluster(budget=14, sink=0, recent=3, lengths=(2, 3), period=3, rank='bound', levels=2)",
    "offloaded(lfps(budget=0.3), tail=8)",
    "twilight(all_pages(), p=0.6)",
    "twilight(all_pages(), p=0.6, dense_below=20)",
    "hard_kv(floor=7, cap=14, p=0.7, period=4, window=4, sink=2, budgets='calibrated')",
    "hard_kv(budget=8, floor=7, cap=12, period=5, window=4, sink=2, patience=2)",
)
METHODS = tuple(x for x in TABLE if x in firsts(TABLE).values() or x in FURTHER)
assert set(FURTHER) | set(MECHANISMS) <= set(METHODS)


# the hyper-parameters at which a method equals dense attention
EVERYTHING = 2**30
DENSE_AT: dict[str, dict[str, Any]] = {
    **{
        name: {"budget": EVERYTHING}
        for name in (
            *(
                "quest",
                "quest_chunks",
                "double_sparsity",
                "tidal",
                "arkvale",
                "lychee_cluster",
                "shadow_kv",
                "cluster_kv",
            ),
            *("oracle_top_k", "verified", "snapkv", "ada_kv", "expected_attention", "h2o"),
            *("r_kv", "raas", "kvzip"),
        )
    },
    "dense": {},
    "auto": {},
    "all_pages": {},
    "streaming": {"sink": 0, "recent": EVERYTHING},
    "oracle_top_p": {"p": 1.0},
    "seer_attention": {"budget": EVERYTHING, "threshold": None},
    "lychee_decode": {"rule": "top_k", "value": EVERYTHING},
    "duo_attention": {"sink": 0, "recent": EVERYTHING},
    "razor_attention": {"sink": 0, "recent": EVERYTHING},
    "lfps": {
        **{"budget": 1.0, "candidates": "top", "exact": False, "bypass": False, "floor": False}
    },
    "magic_pig": {"recent": EVERYTHING},
    "twilight": {"base": parse("all_pages()"), "p": 1.0},
    "hard_kv": {"budget": EVERYTHING, "floor": EVERYTHING, "cap": EVERYTHING},
    "keep": {"recent": EVERYTHING},
    "dense_layers": {"n": EVERYTHING},
    "retrieval_heads": {"policy": parse("dense")},
    "sparse_prefill": {"policy": parse("dense"), "method": "xattention(threshold=1.0)"},
}


def at_dense(expression: str) -> Policy | None:
    """Returns the method at the hyper-parameters at which it is dense; None if it has none."""
    policy, build = parse(expression), POLICIES[outermost(expression)]
    dense_at = DENSE_AT.get(outermost(expression))
    if dense_at is None:
        return None
    node = ast.parse(policy.name, mode="eval").body
    assert isinstance(node, ast.Call)
    given = {str(word.arg): word.value for word in node.keywords}
    values = {
        name: parse(ast.unparse(value))
        if isinstance(value, ast.Call | ast.Name)
        else ast.literal_eval(value)
        for name, value in given.items()
    }
    assert set(dense_at) <= set(inspect.signature(build).parameters), dense_at
    made = build(**{**values, **dense_at})
    assert isinstance(made, Policy)
    return made
