"""Tests codes in registers against their packing, by the emitted instructions of all threads."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic import gpu as mgpu

from jsparse.pallas_kernels.quantized_product.mosaic_codes import Stored, code_registers
from jsparse.pallas_kernels.weight_blocks import packed
from tests.support import mlir_threads


def swizzled(array):
    """64 rows as TMA copies them: 16 bytes change places by the address of their 128 bytes."""
    segments = array.shape[1] // 16
    place = np.arange(segments) ^ (np.arange(64) * segments // 8 % segments)[:, None]
    made = np.empty_like(array).reshape(64, segments, 16)
    np.put_along_axis(made, place[..., None], array.reshape(made.shape), 1)
    return made.reshape(array.shape)


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_threads_have_the_bytes_of_a_tensor_core_operand(bits):
    """A thread has columns 4 (l mod 4) to the next 4, and 16 further, of rows l / 4 and 8 below."""
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (64, 256), np.uint8)
    stored = {name: np.asarray(x) for name, x in packed(jnp.asarray(codes), bits).items()}

    def build(refs, block):
        given = [Stored(mgpu.utils.memref_ptr(refs[x]), stored[x].shape[1]) for x in stored]
        return code_registers(*given, *[None] * (2 - len(given)), block=block, bits=bits)

    memory = {name: swizzled(array) for name, array in stored.items()}
    signed = (codes.astype(np.int32) - (1 << bits - 1)) << 8 - bits
    thread = np.arange(128)
    row, first = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 4
    for block in (0, 3, 7):
        for nth, words in enumerate(mlir_threads.run(partial(build, block=block), memory)):
            column = 32 * block + 16 * (nth // 2) + first[:, None] + np.arange(4)
            wanted = signed[row[:, None] + 8 * (nth % 2), column]
            got = words.astype(np.uint32).view(np.int8).reshape(128, 4)
            np.testing.assert_array_equal(got, wanted)
