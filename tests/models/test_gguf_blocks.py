"""Tests GGUF's blocks on the device against the gguf package."""

import jax.numpy as jnp
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jsparse.models import gguf_blocks
from jsparse.pallas_kernels.weight_blocks import FORMS, dequantized, form_of

# where a block has float16 numbers
HALVES = {"q4_k": [0, 2], "q5_k": [0, 2], "q5_1": [0, 2], "q6_k": [208]}


def random_rows(name, out, width, seed=0):
    """Random bytes of a format with finite scales: [out, blocks, bytes]."""
    rng, kind = np.random.default_rng(seed), GGMLQuantizationType[name.upper()]
    block, nbytes = GGML_QUANT_SIZES[kind]
    rows = rng.integers(0, 256, (out, width // block, nbytes), np.uint8)
    for at in HALVES.get(name, [0]):
        scales = rng.normal(size=(out, width // block, 1)).astype(np.float16)
        rows[..., at : at + 2] = scales.view(np.uint8)
    return rows, dequantize(rows.reshape(out, -1), kind)


@pytest.mark.parametrize("name", FORMS)
def test_numbers_equal_those_of_the_package(name, monkeypatch):
    monkeypatch.setattr(gguf_blocks, "AT_ONCE", 4 * 512)  # 4 rows at a time, three of them twice
    rows, numbers = random_rows(name, 9, 512)
    made = gguf_blocks.CONVERT[name]({"rows": rows})
    assert form_of(made) == FORMS[name]
    np.testing.assert_array_equal(dequantized(made, jnp.float32), numbers)
