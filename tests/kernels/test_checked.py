"""Tests which arguments `checked` refuses, and that its messages name axes and their sizes."""

from typing import Literal, NamedTuple, TypedDict

import numpy as np
import pytest
from jaxtyping import Array, Float, Float32, Int32

from jsparse.pallas_kernels.checked import check_dtypes, checked


class Pair(NamedTuple):
    a: Float32[Array, "B 2"]
    b: Int32[Array, "B #K"] | None = None


class Table(TypedDict):
    rows: Float[Array, "out H"]


@checked(nonempty="H")
def op(
    q: Float[Array, "B N H"],
    count: Int32[Array, "B K"] | None = None,
    pair: Pair | None = None,
    table: Float[Array, "H out"] | Table | None = None,
    rows: Float32[Array, "*lists H"] | None = None,
    kind: Literal["sum", "max"] | None = None,
    more: Float32[Array, "*lists"] | None = None,
    logits: Float32[Array, "B K G"] | None = None,
):
    """Returns the shape of q."""
    return q.shape


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def ints(*shape):
    return zeros(*shape, dtype=np.int32)


Q = zeros(2, 6, 8)


def test_arguments_that_fit_are_accepted():
    for given in (
        {},
        {"count": ints(2, 0)},
        {"count": ints(2, 3), "pair": Pair(zeros(2, 2), ints(2, 3))},
        {"count": ints(2, 3), "pair": Pair(zeros(2, 2), ints(2, 1))},
        {"table": zeros(8, 5)},
        {"table": {"rows": zeros(5, 8, dtype=np.float16)}},
        {"rows": zeros(3, 4, 8), "more": zeros(3, 4)},
        {"rows": zeros(8), "more": zeros()},
        {"kind": "max"},
        {"count": ints(2, 3), "logits": zeros(2, 3, 2)},
    ):
        assert op(Q, **given) == Q.shape, given


def test_arguments_that_do_not_fit_are_refused():
    divisor = "must be int32[B=2 (q), K], K a divisor of N=6 (q)"
    pairs = Pair(zeros(2, 2), ints(2, 2))
    for given, message in (
        ({"q": zeros(2, 8)}, "q=float32[2, 8]: must be float[B, N, H>0]"),
        ({"q": ints(2, 6, 8)}, "q=int32[2, 6, 8]: must be float[B, N, H>0]"),
        ({"q": zeros(2, 6, 0)}, "q=float32[2, 6, 0]: must be float[B, N, H>0]"),
        ({"count": ints(3, 3)}, f"count=int32[3, 3]: {divisor}"),
        ({"count": ints(2, 4)}, f"count=int32[2, 4]: {divisor}"),
        ({"pair": Pair(zeros(2, 3))}, "pair.a=float32[2, 3]: must be float32[B=2 (q), 2]"),
        (
            {"count": ints(2, 3), "pair": pairs},
            "pair.b=int32[2, 2]: must be int32[B=2 (q), #K=3 (count)]",
        ),
        ({"table": zeros(5, 8)}, "table=float32[5, 8]: must be float[H=8 (q), out]"),
        ({"table": {"rows": zeros(5, 9)}}, "table.rows=float32[5, 9]: must be float[out, H=8 (q)]"),
        (
            {"rows": zeros(3, 4, 8), "more": zeros(3)},
            "more=float32[3]: must be float32[*lists=(3, 4) (rows)]",
        ),
        ({"rows": zeros()}, "rows=float32[]: must be float32[*lists, H=8 (q)]"),
        ({"kind": "min"}, "kind='min': must be None or one of ['sum', 'max']"),
        (
            {"count": ints(2, 3), "logits": zeros(2, 3, 3)},
            "logits=float32[2, 3, 3]: must be float32[B=2 (q), K=3 (count), G], "
            "G · K equal to N=6 (q)",
        ),
    ):
        with pytest.raises(ValueError, match="must be") as error:
            op(**{"q": Q, **given})
        assert str(error.value) == message


def test_dtypes_must_match_the_first():
    check_dtypes(x=Q, matrix=Q, bias=None)
    with pytest.raises(ValueError, match="bias.dtype=int32: must be that of x, float32"):
        check_dtypes(x=Q, matrix=Q, bias=ints(2))
