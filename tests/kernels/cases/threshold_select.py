"""Cases of `threshold_select`. Scores past a head's length are `JUNK`, to detect reads."""

from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax.numpy as jnp
import numpy as np

from jsparse.pallas_kernels.threshold_select import Always, Budget, Threshold, TopK, TopP
from tests.kernels.cases.named import Named, put

JUNK = 1e30
Inputs = namedtuple("Inputs", "scores rule kwargs")


@dataclass(frozen=True)
class Case(Named):
    """A call of `threshold_select`.

    Attributes:
        size: n.
        rule, value: the rule and its number.
        per_head: whether each head has its own number, from half of `value` to `value`.
        sizes: sizes of units under a budget: "some", 8 to 16, one in 50 of 150 to 400; "few", 0 or
            1, as bytes; "shared", like "some", but the same for all heads.
        capacity: C; None: the number of units.
        pool: the op's argument `group`.
        like: distribution of the scores: "normal"; "sink", normal except a few far above; "ties",
            few different numbers; "pairs", each twice; "constant"; "masked", three in four are
            -inf, some rows throughout; "nan", some are NaN.
        spread: standard deviation of the scores.
        ragged: whether heads have different lengths, including 0, 1 and n.
        span: number of neighbouring units with one name; None: no names are passed.
        always: `sink`, `recent` and `unit` of the units that are always listed; heads hold up to n
            · unit slots, including 0, 1 and all of them. None: no such units.
        dtype: type of the scores.
    """

    batch: int = 2
    kv_heads: int = 2
    group: int = 1
    size: int = 200
    rule: Literal["top_k", "top_p", "threshold", "budget"] = "top_p"
    value: float = 0.9
    per_head: bool = False
    sizes: Literal["some", "few", "shared"] = "some"
    capacity: int | None = None
    granularity: str = "token"
    page_size: int | None = None
    weights: Literal["softmax", "raw"] = "softmax"
    pool: Literal["union", "max"] = "union"
    like: Literal["normal", "sink", "ties", "pairs", "constant", "masked", "nan"] = "normal"
    spread: float = 3.0
    ragged: bool = False
    span: int | None = None
    always: tuple[int, int, int] | None = None
    dtype: str = "float32"

    @property
    def units(self) -> int:
        """The number of units that can be listed."""
        return self.size // (self.page_size or 1)

    def inputs(self, rng: np.random.Generator) -> Inputs:
        heads = (self.batch, self.kv_heads)
        scores = _scores(self, rng)
        lengths = None
        if self.ragged:
            lengths = rng.integers(1, self.size + 1, heads)
            lengths.flat[:3] = self.size, 0, 1
            scores = np.where(np.arange(self.size) < lengths[..., None, None], scores, JUNK)
        always = None
        if self.always is not None:
            held = rng.integers(1, self.size * self.always[2] + 1, heads)
            held.flat[:3] = self.size * self.always[2], 0, 1
            always = Always(put(held, np.int32), *self.always)
        value = self.value
        if self.per_head:
            value = self.value * rng.uniform(0.5, 1.0, heads)
            whole = self.rule in ("top_k", "budget")
            value = put(value, np.int32 if whole else np.float32)
        rule = {
            "top_k": TopK,
            "top_p": TopP,
            "threshold": Threshold,
            "budget": lambda tokens: Budget(
                tokens, put(_sizes(self, rng), np.uint8 if self.sizes == "few" else np.int32)
            ),
        }[self.rule](value)
        kwargs = {
            "capacity": self.units if self.capacity is None else self.capacity,
            "granularity": self.granularity,
            "page_size": self.page_size,
            "weights": self.weights,
            "group": self.pool,
            "lengths": put(lengths, np.int32),
            "names": None if self.span is None else _names(self.units // self.span, heads, rng),
            "always": always,
        }
        return Inputs(put(scores, self.dtype), rule, kwargs)


def _scores(case: Case, rng: np.random.Generator) -> np.ndarray:
    shape = (case.batch, case.kv_heads, case.group, case.size)
    scores = rng.normal(size=shape) * case.spread
    if case.like == "sink":
        scores[..., :2] += 5 * case.spread
        scores[..., -8:] += 2 * case.spread
    if case.like == "ties":
        scores = np.rint(scores)
    if case.like == "pairs":
        half = -(-case.size // 2)
        scores = np.take(scores, rng.permutation(np.arange(case.size) % half), -1)
    if case.like == "constant":
        scores = np.full(shape, 0.5)
    if case.like == "masked":
        scores[rng.random(shape) < 0.75] = -np.inf
        scores[0, 0] = -np.inf
        scores[-1, -1, 0] = -np.inf
    if case.like == "nan":
        scores[rng.random(shape) < 0.1] = np.nan
    if case.weights == "raw" and case.rule == "top_p":
        scores = np.where(np.isneginf(scores), scores, np.abs(scores))
    return scores


def _sizes(case: Case, rng: np.random.Generator) -> np.ndarray:
    shape = (case.batch, 1 if case.sizes == "shared" else case.kv_heads, case.size)
    if case.sizes == "few":
        return rng.integers(0, 2, shape)
    large = rng.random(shape) < 0.02
    return np.where(large, rng.integers(150, 400, shape), rng.integers(8, 17, shape))


def _names(number: int, heads: tuple[int, int], rng: np.random.Generator) -> jnp.ndarray:
    names = [
        np.sort(rng.choice(4 * number, number, replace=False)) for _ in range(heads[0] * heads[1])
    ]
    return put(np.reshape(names, (*heads, number)), np.int32)


_top_k = partial(Case, rule="top_k")
_budget = partial(Case, rule="budget")
_mass = partial(Case, granularity="page_mass", page_size=8)

CASES = (
    Case("top_p"),
    Case("top_p_all", value=1.0),
    Case("top_p_spiky", spread=30.0, value=0.99),
    Case("top_p_ties", like="ties"),
    Case("top_p_nan", like="nan"),
    Case("top_p_masked", like="masked", group=2),
    Case("top_p_per_head", per_head=True),
    Case("top_p_weights", weights="raw", value=0.6),
    Case("top_p_capped", capacity=16, value=0.99),
    Case("top_p_union", group=4),
    Case("top_p_union_capped", group=4, capacity=40, ragged=True),
    Case("top_p_ragged", ragged=True),
    Case("top_p_bfloat16", dtype="bfloat16"),
    Case("one_row", batch=1, kv_heads=1, size=64),
    Case("one_score", size=1),
    Case("odd_size", size=333, ragged=True),
    _top_k("top_k", value=17),
    _top_k("top_k_more_than_there_are", value=300, like="masked"),
    _top_k("top_k_ties", value=50, like="ties"),
    _top_k("top_k_constant", value=50, like="constant"),
    _top_k("top_k_nan", value=150, like="nan"),
    _top_k("top_k_per_head", value=60, per_head=True, ragged=True),
    _top_k("top_k_capped", value=60, capacity=20, like="ties"),
    _top_k("top_k_union", value=20, group=4, like="sink"),
    _top_k("top_k_union_capped", value=20, group=4, capacity=30),
    _top_k("top_k_max", value=20, group=4, pool="max"),
    _top_k(
        "top_k_max_raw",
        value=20,
        group=3,
        pool="max",
        weights="raw",
        granularity="page",
        ragged=True,
    ),
    _top_k("always", value=20, always=(3, 30, 8), granularity="page", weights="raw"),
    _top_k("always_too_many", value=6, always=(40, 40, 1), capacity=4),
    _top_k("always_masked", value=20, always=(4, 9, 1), like="masked", ragged=True),
    _top_k("always_nan", value=20, always=(4, 9, 1), like="nan"),
    _top_k("always_max", value=12, always=(5, 0, 3), group=4, pool="max", span=8),
    Case("top_p_max", group=4, pool="max", capacity=20),
    # several programs use such rows
    _top_k("top_k_long", value=700, size=33333, like="ties", ragged=True),
    _top_k(
        "always_long", value=700, size=40000, batch=1, kv_heads=3, always=(4, 64, 1), ragged=True
    ),
    _top_k("top_k_long_max", value=700, size=40000, batch=1, group=3, pool="max", capacity=700),
    Case("top_p_long", size=40000, value=0.7, ragged=True),
    Case("top_p_long_row", size=33333, value=0.7, batch=1, kv_heads=1),
    Case("threshold", rule="threshold", value=0.01),
    Case("threshold_raw", rule="threshold", value=2.0, weights="raw", group=2, per_head=True),
    Case("threshold_max", rule="threshold", value=0.02, group=3, pool="max", ragged=True),
    _budget("budget", value=300),
    _budget("budget_for_all", value=100_000, like="masked"),
    _budget("budget_ties", value=500, like="ties", sizes="shared"),
    _budget("budget_pairs", value=500, like="pairs", per_head=True),
    _budget("budget_few", value=30, like="ties", sizes="few"),
    _budget("budget_huge", value=300, spread=1e36),
    _budget("budget_masked", value=200, group=2, like="masked", per_head=True),
    _budget("budget_ragged", value=900, size=333, ragged=True, granularity="page"),
    _budget("budget_capped", value=900, group=2, capacity=20, like="ties"),
    _budget("budget_max", value=600, group=4, pool="max", span=8, sizes="shared"),
    _mass("mass_top_p", page_size=16, size=640, group=2),
    _mass("mass_top_k", rule="top_k", value=9, group=2, ragged=True),
    _mass("mass_max", rule="top_k", value=9, group=4, pool="max"),
    _mass("mass_capped", value=0.99, group=2, capacity=6, like="masked"),
    _mass("mass_weights", weights="raw", value=0.5, like="masked"),
    Case("named", span=1, size=333, group=2, ragged=True),
    Case("named_tokens", span=8, group=2, ragged=True),
    Case("named_all_tokens", span=32, size=640, value=1.0, pool="max", group=2),
    _mass("named_mass", span=1, value=0.7, group=2, ragged=True),
    _mass("named_mass_capped", span=1, value=0.99, group=2, capacity=6, like="masked"),
    _mass("named_mass_pairs", span=2, page_size=64, size=640, rule="top_k", value=5, group=2),
)
