"""Tests that joined K-quants keep every number."""

import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.models.gguf_blocks import CONVERT
from jsparse.models.joined_blocks import common_form, joined
from jsparse.pallas_kernels.weight_blocks import FORMS, Form, dequantized, form_of
from tests.models.test_gguf_blocks import random_rows

SIX, FIVE = (Form(bits, group, "int8", True, True) for bits, group in ((6, 16), (5, 32)))


@pytest.mark.parametrize(
    ("names", "form"),
    [
        (("q4_k", "q4_k", "q6_k"), SIX),
        (("q6_k", "q5_k"), SIX),
        (("q4_k", "q5_k"), FIVE),
        (("q8_0", "q8_0"), FORMS["q8_0"]),
    ],
)
def test_numbers_stay(names, form):
    parts = [random_rows(name, 3 + nth, 512, seed=nth) for nth, name in enumerate(names)]
    assert common_form([FORMS[name] for name in names]) == form
    blocks = [CONVERT[name]({"rows": rows}) for name, (rows, _) in zip(names, parts, strict=True)]
    whole = joined(tuple(blocks), form)
    assert form_of(whole) == form
    expected = np.concatenate([numbers for _, numbers in parts])
    np.testing.assert_array_equal(dequantized(whole, jnp.float32), expected)


def test_other_formats_have_no_common_one():
    assert common_form([FORMS["q4_0"], FORMS["q4_k"]]) is None
    assert common_form([FORMS["q4_0"], FORMS["q8_0"]]) is None
