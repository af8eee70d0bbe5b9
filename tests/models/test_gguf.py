"""Tests loading GGUF files: each tensor type gives the package's values, and wrong fields are
refused.
"""

import struct

import gguf
import jax
import numpy as np
import pytest
import tokenizers
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jsparse.models.checkpoint import load
from jsparse.models.config_files import read_config
from jsparse.models.tokenizer import Tokenizer
from tests.support.writers import (
    PACKAGE_CAN,
    SMALL,
    TENSORS,
    WIDE,
    assert_refused,
    expected_weights,
    hf_tensors,
    write_gguf,
)


@pytest.fixture
def file(tmp_path):
    return write_gguf(tmp_path / "model.gguf", SMALL, TENSORS)


def encode(values, kind, rng):
    """Encodes an array as bytes of `kind`.

    The package quantises it if it can; otherwise the bytes are random and their values finite.
    """
    try:
        data = gguf.quants.quantize(values, kind)
        return data if kind in (Kind.F32, Kind.F16) else data.view(np.uint8)
    except NotImplementedError:
        pass
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = np.zeros((values.size // block, block_bytes), np.uint8)
    broken = np.ones(len(data), bool)
    while broken.any():
        data[broken] = rng.integers(0, 256, (broken.sum(), block_bytes), np.uint8)
        with np.errstate(all="ignore"):
            broken = ~np.isfinite(gguf.quants.dequantize(data, kind)).all(axis=1)
    return data.reshape(len(values), -1)


@pytest.mark.parametrize("kind", PACKAGE_CAN, ids=lambda kind: kind.name)
def test_every_type_gives_the_values_of_the_package(kind, tmp_path):
    rng = np.random.default_rng(int(kind))
    tensors = hf_tensors(WIDE)
    raw = {
        name: (encode(values, kind, rng), kind)
        for name, values in tensors.items()
        if values.ndim == 2
    }
    loaded = load(write_gguf(tmp_path / "m.gguf", WIDE, tensors, raw=raw))
    values = tensors | {name: gguf.quants.dequantize(data, kind) for name, (data, _) in raw.items()}
    expected = expected_weights(WIDE, values)
    assert np.ptp(expected["params"]["embed"]) > 0
    jax.tree.map(np.testing.assert_array_equal, loaded.weights, expected)


def test_other_types_are_refused(tmp_path):
    for kind in sorted(set(gguf.GGML_QUANT_SIZES) - set(PACKAGE_CAN)):
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        name = "model.layers.0.self_attn.q_proj.weight"
        tensors = hf_tensors(WIDE)
        raw = {name: (np.zeros((256, 256 // block * block_bytes), np.uint8), kind)}
        with pytest.raises(
            ValueError,
            match=f"stores 'blk.0.attn_q.weight' as type {kind.name}: must be one of F32, F16",
        ):
            load(write_gguf(tmp_path / "m.gguf", WIDE, tensors, raw=raw))


def patched(path, old, new, after=b""):
    """Replaces the bytes `old` after the first `after` in a file."""
    data = path.read_bytes()
    start = data.index(old, data.index(after))
    path.write_bytes(data[:start] + new + data[start + len(old) :])
    return path


def u32(value):
    return struct.pack("<I", value)


def u64(value):
    return struct.pack("<Q", value)


def refuses(path, match):
    """Checks that loading raises a one-line error that matches and names the file."""
    assert str(path) in assert_refused(path, match)


def test_wrong_counts_are_refused(file):
    for count in [10**6, 2**31, 2**63, 2**64 - 1]:
        write_gguf(file, SMALL, TENSORS)
        data = file.read_bytes()
        for at, what in ((8, "tensors"), (16, "metadata entries")):
            file.write_bytes(data[:at] + u64(count) + data[at + 8 :])
            refuses(file, f"{count} {what}")
        file.write_bytes(data)
        refuses(patched(file, u64(len("llama")), u64(count), b"general.architecture"), "asks for")


def test_wrong_fields_are_refused(file):
    embed, shape, kind = b"token_embd.weight", u64(32) + u64(40), u64(40) + u32(0)
    for old, new, after, match in [
        (b"GGUF", b"GGML", b"", "begins with b'GGML'"),
        (u32(3), u32(1), b"GGUF", "version 1"),
        (u32(3), struct.pack(">I", 3), b"GGUF", "little-endian"),
        (u32(8), u32(13), b"general.architecture", "unknown type 13"),
        (b"llama", b"\xff\xfe\xff\xff\xff", b"general.architecture", "not UTF-8"),
        (b"llama.context_length", b"llama.embeddi_length", b"", "context_length"),
        (b"llama.vocab_size", b"llama.block_coun", b"", "vocab_size"),
        (b"blk.0.attn_k.weight", b"blk.0.attn_q.weight", b"", "twice"),
        (u32(2), u32(0), embed, "0 dimensions"),
        (u32(2), u32(2**32 - 1), embed, "4294967295 dimensions"),
        (shape, u64(40) + u64(32), embed, r"shape \(32, 40\)"),
        (shape, u64(32) + u64(0), embed, "must be positive"),
        (shape, u64(2**63) + u64(2**63), embed, "truncated or damaged"),
        (kind, u64(40) + u32(99), embed, "type 99"),
        (kind, u64(40) + u32(12), embed, "a multiple of 256"),
        (kind + u64(0), kind + u64(32), embed, "overlap"),
        (kind + u64(0), kind + u64(1), embed, "multiple of 32"),
        (kind + u64(0), kind + u64(2**63), embed, "truncated or damaged"),
    ]:
        write_gguf(file, SMALL, TENSORS)
        refuses(patched(file, old, new, after), match)


def test_odd_alignment_is_refused(file):
    for alignment in [0, 3, 2**32 - 1]:
        key = b"general.alignment"
        old = u64(len(b"llama.context_length")) + b"llama.context_length" + u32(4) + u32(128)
        write_gguf(file, SMALL, TENSORS)
        refuses(
            patched(file, old, u64(len(key)) + key + u32(4) + u32(alignment)), "general.alignment"
        )


def test_truncated_files_are_refused(file):
    for size in [0, 4, 23, 24, 100, 1000, -1, -4000]:
        write_gguf(file, SMALL, TENSORS)
        file.write_bytes(file.read_bytes()[:size])
        refuses(file, "bytes")


def test_metadata_that_contradict_the_tensors_are_refused(tmp_path):
    for change, match in [
        ({"block_count": 2}, "lacks blk.1"),
        ({"block_count": 2**32 - 1}, "num_layers=4294967295"),
        ({"vocab_size": 41}, "token_embd.weight has shape"),
        ({"feed_forward_length": 47}, "ffn_gate"),
        ({"attention.head_count_kv": 4}, "attn_k"),
    ]:
        refuses(write_gguf(tmp_path / "m.gguf", SMALL, TENSORS, metadata=change), match)


def test_unknown_tensors_and_misshapen_rope_factors_are_refused(tmp_path):
    bias = {"blk.0.ffn_up.bias": np.ones(48, np.float32)}
    refuses(write_gguf(tmp_path / "bias.gguf", SMALL, TENSORS, extra=bias), "blk.0.ffn_up.bias")
    factors = {"rope_freqs.weight": np.ones(5, np.float32)}
    refuses(
        write_gguf(tmp_path / "rope.gguf", SMALL, TENSORS, extra=factors),
        "rope_factors has 5 entries",
    )


def test_embedding_has_rows_without_a_token_only_if_the_file_has_them(tmp_path):
    for stated in [42, 40, None]:
        config = SMALL | {"vocab_size": 42}
        made = {"metadata": {"vocab_size": stated}, "tokens": [f"t{n}" for n in range(40)]}
        file = write_gguf(tmp_path / "m.gguf", config, hf_tensors(config), **made)
        core = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
        if stated == 42:
            assert load(file, tokenizer=Tokenizer(core)).config.vocab_size == 42, stated
        else:
            with pytest.raises(
                ValueError, match=r"has shape \(42, \d+\): the config asks for \(40, "
            ):
                load(file, tokenizer=Tokenizer(core))


def split_in_three(folder):
    """Writes a small model as one file, and as three by the format's own library."""
    whole = write_gguf(folder / "whole.gguf", SMALL, TENSORS)
    count = -(-len(TENSORS) // 3)
    write_gguf(folder / "m.gguf", SMALL, TENSORS, split_max_tensors=count)
    return whole, sorted(folder.glob("m-*.gguf"))


def test_split_model_is_that_of_one_file(tmp_path):
    whole, files = split_in_three(tmp_path)
    assert len(files) == 3
    jax.tree.map(np.testing.assert_array_equal, load(files[0]).weights, load(whole).weights)


def test_split_model_must_be_complete_and_begin_with_its_first_file(tmp_path):
    _, files = split_in_three(tmp_path)
    refuses(files[1], "is file 2 of 3: must be the first, m-00001-of-00003.gguf")
    renamed = files[0].rename(tmp_path / "other.gguf")
    refuses(renamed, "is file 1 of 3: must be named .*-00001-of-00003.gguf")
    renamed.rename(files[0])
    files[2].write_bytes(files[1].read_bytes())
    with pytest.raises(ValueError, match=r"m-00003-of-00003.gguf holds '.*' again"):
        load(files[0])
    files[2].unlink()
    with pytest.raises(FileNotFoundError, match=r"m-00003-of-00003.gguf does not exist"):
        read_config(files[0])


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(at=st.integers(4, 1500), value=st.integers(0, 2**64 - 1), width=st.sampled_from([1, 4, 8]))
@example(at=8, value=2**40, width=8)
def test_changed_bytes_never_crash(at, value, width, file):
    write_gguf(file, SMALL, TENSORS)
    data = bytearray(file.read_bytes())
    data[at : at + width] = u64(value)[:width]
    file.write_bytes(data)
    try:
        load(file)
    except ValueError as error:
        assert str(file) in str(error)
