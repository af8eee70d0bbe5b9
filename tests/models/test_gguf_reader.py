"""Tests that GGUFFile reads metadata and tensors as the gguf package wrote them."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from jsparse.models.gguf import QUANTISATIONS, GGUFFile
from tests.support.writers import (
    PACKAGE_CAN,
    SMALL,
    TENSORS,
    WIDE,
    gguf_name,
    hf_tensors,
    write_gguf,
)

pytestmark = pytest.mark.pure


@pytest.fixture
def file(tmp_path):
    return write_gguf(tmp_path / "model.gguf", SMALL, TENSORS)


def test_types_are_all_that_the_package_can_dequantise():
    assert set(QUANTISATIONS) == set(PACKAGE_CAN)


def test_long_tensors_are_dequantised_in_pieces(monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(40, 256)).astype(np.float32)
    data = gguf.quants.quantize(values, Kind.Q8_0)
    raw = {"model.embed_tokens.weight": (data, Kind.Q8_0)}
    store = GGUFFile(write_gguf(tmp_path / "m.gguf", WIDE, hf_tensors(WIDE), raw=raw))
    monkeypatch.setattr("jsparse.models.gguf._VALUES_AT_ONCE", 7 * 256)
    np.testing.assert_array_equal(
        store.read("token_embd.weight"), gguf.quants.dequantize(data, Kind.Q8_0)
    )


def test_metadata_equal_those_of_the_package(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    written = {
        "u8": (7, writer.add_uint8), "i8": (-7, writer.add_int8), "u16": (65535, writer.add_uint16),
        "i16": (-9, writer.add_int16), "u32": (2**32 - 1, writer.add_uint32),
        "i32": (-3, writer.add_int32), "u64": (2**64 - 1, writer.add_uint64),
        "i64": (-(2**63), writer.add_int64), "f32": (0.5, writer.add_float32),
        "f64": (0.1, writer.add_float64), "yes": (True, writer.add_bool),
        "text": ("Ġ\n\0é", writer.add_string),
        "words": (["", "a", "日本"], writer.add_array), "numbers": ([1, -2], writer.add_array),
        "floats": ([0.5, -1.0], writer.add_array), "flags": ([True, False], writer.add_array),
    }  # fmt: skip
    for key, (value, add) in written.items():
        add(f"x.{key}", value)
    writer.add_tensor("t", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    store = GGUFFile(path)
    assert store.metadata == {"general.architecture": "llama"} | {
        f"x.{k}": value for k, (value, _) in written.items()
    }
    np.testing.assert_array_equal(store.read("t"), np.arange(6).reshape(2, 3))


def test_file_truncated_after_its_header_was_read_is_refused(file):
    store = GGUFFile(file)
    file.write_bytes(file.read_bytes()[:-8])
    last = gguf_name(SMALL, list(TENSORS)[-1])
    with pytest.raises(ValueError, match=f"{last} ends after"):
        store.read(last)
