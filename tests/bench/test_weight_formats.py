"""Tests the files that bench.weight_formats writes, and its figures on a tiny model."""

import json

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

import jsparse
from bench import weight_formats
from bench.lib.quantized_files import QUANTIZERS, write_gguf, write_safetensors
from bench.weight_formats import main, read_source
from jsparse.evaluation import texts
from jsparse.models.quantization_config import scheme_of
from jsparse.models.quantized_safetensors import QuantizedSafetensors
from tests.support.model_tokenizers import metadata_of, tokenizer_of
from tests.support.writers import gguf_name, hf_config, hf_tensors

MATRIX = "model.layers.0.mlp.down_proj.weight"
# the numbers of a scale, and the largest code of its largest number
GROUPS = {"w8a16": ((1, 256), 127.5), "w4a16": ((1, 128), 7.5), "gptq": ((1, 128), 7.5)}
TOKENIZER = {key: value for key, value in metadata_of("qwen2").items() if "tokenizer" in key}
CONFIG = hf_config(
    "qwen2",
    vocab_size=len(TOKENIZER["tokenizer.ggml.tokens"]),
    hidden_size=128,
    intermediate_size=256,
    head_dim=32,
    num_hidden_layers=1,
    tie_word_embeddings=True,
)


def matrix():
    """Numbers whose groups have different sizes, and one group of zeros."""
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(192, 256)) * rng.uniform(0.01, 1, (192, 1)) + 0.1
    numbers[7, :128] = 0
    return numbers.astype(np.float32)


def read_back(folder, name, numbers):
    """Returns the numbers of a quantized matrix, with a norm beside it."""
    norm = np.ones(256, ml_dtypes.bfloat16)
    tensors = {MATRIX: numbers, "model.norm.weight": norm}
    write_safetensors(folder / name, {"model_type": "qwen2"}, tensors, QUANTIZERS[name])
    config = json.loads((folder / name / "config.json").read_text())
    store = QuantizedSafetensors(folder / name, scheme_of(config))
    assert config["model_type"] == "qwen2" and set(store.shapes) == set(tensors)
    assert store.kind("model.norm.weight") == "bfloat16" and store.form(MATRIX) is not None
    return store.read(MATRIX)


@pytest.mark.parametrize("name", GROUPS)
def test_integers_of_symmetric_formats_are_the_nearest(name, tmp_path):
    numbers, ((_, columns), top) = matrix(), GROUPS[name]
    found = read_back(tmp_path, name, numbers)
    groups = np.abs(numbers).reshape(len(numbers), -1, columns)
    step = groups.max(-1, keepdims=True) / top
    # half a step, and the scale's own rounding to 8 bits, which the largest codes multiply
    allowed = step / 2 + groups / 256
    assert (np.abs(found - numbers).reshape(groups.shape) <= allowed).all()
    assert not found[7, :128].any()


def test_integers_of_awq_are_the_nearest(tmp_path):
    numbers = matrix()
    found = read_back(tmp_path, "awq", numbers)
    groups = numbers.reshape(len(numbers), -1, 128)
    step = (groups.max(-1, keepdims=True) - groups.min(-1, keepdims=True).clip(None, 0)) / 15
    # the rounded zero point moves the ends of the range by up to half a step more
    error = np.abs(found.reshape(groups.shape) - groups) / np.maximum(step, 1e-30)
    assert error.max() <= 1.01 and np.quantile(error, 0.9) <= 0.5


@pytest.mark.parametrize(("name", "rows", "columns"), [("blocks", 128, 128), ("channels", 1, 256)])
def test_float8_numbers_are_the_nearest(name, rows, columns, tmp_path):
    numbers = matrix()
    found = read_back(tmp_path, f"fp8-{name}", numbers)
    padded = np.zeros((-(-192 // rows) * rows, 256), np.float32)
    padded[:192] = np.abs(numbers)
    largest = padded.reshape(-1, rows, 256 // columns, columns).max((1, 3))
    scale = np.kron(largest / 448, np.ones((rows, columns), np.float32))[:192]
    # 3 bits after the first, or multiples of 2**-9 below 2**-6; the largest of 448 may be cut off
    allowed = np.abs(numbers) * (2**-4 + 2**-8) + scale * 2**-10
    assert (np.abs(found - numbers) <= allowed).all()
    assert np.abs(found).max() <= largest.max() * 1.01


def test_groups_that_do_not_divide_a_matrix_are_refused(tmp_path):
    tensors = {MATRIX: np.ones((8, 96), np.float32)}
    with pytest.raises(ValueError, match=rf"{MATRIX}: sums over 96 numbers: must be a multiple"):
        write_safetensors(tmp_path / "awq", {}, tensors, QUANTIZERS["awq"])


def write_tiny(path, **changes):
    """Writes a GGUF file of one layer with the tokenizer of the fixtures, in Q8_0."""
    config = CONFIG | changes
    fields = {
        "general.architecture": "qwen2",
        "qwen2.block_count": 1,
        "qwen2.context_length": config["max_position_embeddings"],
        "qwen2.embedding_length": config["hidden_size"],
        "qwen2.feed_forward_length": config["intermediate_size"],
        "qwen2.attention.head_count": config["num_attention_heads"],
        "qwen2.attention.head_count_kv": config["num_key_value_heads"],
        "qwen2.attention.key_length": config["head_dim"],
        "qwen2.attention.value_length": config["head_dim"],
        "qwen2.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "qwen2.rope.freq_base": config["rope_theta"],
    }
    made = hf_tensors(config).items()
    tensors = {gguf_name(config, name): array / 5 for name, array in made}
    return write_gguf(path, fields | TOKENIZER, tensors, GGMLQuantizationType.Q8_0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf")


def test_gguf_file_has_its_types_and_the_source_s_metadata(tiny, tmp_path):
    source = read_source(tiny)
    path = tmp_path / "made.gguf"
    write_gguf(path, source.metadata, source.tensors, GGMLQuantizationType.Q4_0)
    reader = gguf.GGUFReader(path)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["token_embd.weight"] == "Q8_0" and kinds["blk.0.attn_norm.weight"] == "F32"
    assert kinds["blk.0.attn_q.bias"] == "F32" and kinds["blk.0.ffn_down.weight"] == "Q4_0"
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    assert tokens == TOKENIZER["tokenizer.ggml.tokens"]
    assert reader.fields["qwen2.rope.freq_base"].contents() == CONFIG["rope_theta"]


def test_source_is_rounded_and_has_the_names_of_both_formats(tiny):
    source, expected = read_source(tiny), hf_tensors(CONFIG)
    assert set(source.hf_tensors) == set(expected)
    for name, array in source.hf_tensors.items():
        assert array.dtype == ml_dtypes.bfloat16 and array.shape == expected[name].shape
        np.testing.assert_allclose(array.astype(np.float32), expected[name] / 5, atol=0.01)


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.slow
def test_figures_of_a_tiny_model(tiny, tmp_path, capsys):
    out = tmp_path / "report.json"
    words = ["--model", str(tiny), "--tiny", "--rows", "1", "--formats", "gguf-q4_0"]
    main([*words, "--allow-modified", "--json", str(out)])
    plain, rounded = json.loads(out.read_text())["results"]
    assert [plain["format"], rounded["format"]] == ["bf16", "gguf-q4_0"]
    assert (plain["rounded_to_nearest"], rounded["rounded_to_nearest"]) == (False, True)

    source = read_source(tiny)
    numbers = sum(array.size for array in source.tensors.values())
    assert 2 * numbers < plain["file_bytes"] < 2 * numbers + 4096
    assert plain["weight_bytes"] == rounded["weight_bytes"] == 4 * numbers
    assert plain["kl"] == 0 and plain["agreement"] == 1
    assert plain["load_peak_bytes"] is None
    assert [step["batch"] for step in plain["steps"]] == [1]

    files = [
        write_safetensors(tmp_path / "plain", source.config, source.hf_tensors),
        write_gguf(
            tmp_path / "q4.gguf", source.metadata, source.tensors, GGMLQuantizationType.Q4_0
        ),
    ]
    assert rounded["file_bytes"] == files[1].stat().st_size
    tokens = tokenizer_of("qwen2").encode(texts.read(None))
    windows = [tokens[at : at + 33] for at in (0, len(tokens) // 2)]
    p, q = (
        np.stack([log_softmax(jsparse.logits(jsparse.load(file), w[:-1])[0]) for w in windows])
        for file in files
    )
    expected = (np.exp(p) * (p - q)).sum(-1)
    assert rounded["kl"] == pytest.approx(expected.mean(), rel=0.01)
    assert rounded["kl_of_excerpts"] == pytest.approx(expected.mean(-1), rel=0.01)
    assert rounded["agreement"] == pytest.approx((p.argmax(-1) == q.argmax(-1)).mean(), abs=0.04)
    target = np.array(windows)[:, 1:, None]
    likelihood = np.take_along_axis(q, target, -1).mean()
    assert rounded["perplexity"] == pytest.approx(np.exp(-likelihood), rel=0.01)

    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].startswith("gguf-q4_0 (RTN)") and printed[-1].endswith("float32")


def test_format_that_cannot_be_written_is_a_row_with_its_error(tmp_path, capsys, monkeypatch):
    figures = {
        "file_bytes": 3_000_000_000,
        "weight_bytes": 2_000_000_000,
        "load_peak_bytes": 2_500_000_000,
        "load_seconds": {"median": 1.5},
        "kl": 0.25,
        "agreement": 0.5,
        "types": "bfloat16",
        "steps": [{"batch": 8, "context": 64, "ms": {"median": 2}}],
    }
    monkeypatch.setattr(weight_formats, "measured", lambda name, path, options: figures)
    model, out = write_tiny(tmp_path / "narrow.gguf", hidden_size=96), tmp_path / "report.json"
    words = ["--model", str(model), "--tiny", "--formats", "awq", "gguf-q4_0"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--allow-modified", "--json", str(out)])
    assert ended.value.code == 1
    rows = {row["format"]: row for row in json.loads(out.read_text())["results"]}
    assert list(rows) == ["bf16", "awq", "gguf-q4_0"]
    assert "sums over 96 numbers" in rows["awq"]["error"] and "kl" not in rows["awq"]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    cells = ["3.000", "2.000", "1.25x", "1.50", "2.000", "0.25000", "50.00", "bfloat16"]
    assert lines[-3] == ["bf16", *cells] and lines[-2] == ["gguf-q4_0", "(RTN)", *cells]
    assert lines[-1][:3] == ["awq", "(RTN)", "failed:"]


def test_what_is_not_a_gguf_file_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="model=.*must be a GGUF file"):
        main(["--model", str(tmp_path), "--allow-modified"])
