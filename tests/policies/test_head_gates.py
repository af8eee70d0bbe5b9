"""Tests gates, masks and files that mark retrieval heads, and DuoAttention, which reads them."""

import numpy as np
import pytest
from safetensors.numpy import save_file

import jsparse
from jsparse.policies import head_gates
from jsparse.policies.expressions import parse
from jsparse.policies.head_gates import HeadGates
from tests.support.slow_model import SlowModel, SlowRow
from tests.support.tiny import (
    assert_close,
    engine_logits,
    random_prompts,
    random_tokens,
    spec_of,
    tiny_params,
)

MASK = np.array([[True, True], [False, True], [True, False]])
ROWS = ((1, 1), (0, 1), (1, 0))
SCORES = np.linspace(0, 1, 6, dtype=np.float32).reshape(3, 2)
METHODS = [jsparse.lychee_decode, jsparse.duo_attention]
IS_MASK = "must be a name, a path, or 0 and 1 for every layer and KV head"


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """Two shipped files: "first" has no scores, and retrieval heads only in layer 0."""
    monkeypatch.setattr(head_gates, "files", lambda package: tmp_path / package)
    folder = tmp_path / "jsparse.policies" / "gates"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("not gates")
    head_gates.save(HeadGates(MASK, SCORES), folder / "second.safetensors")
    head_gates.save(HeadGates(np.array([[True], [False]])), folder / "first.safetensors")


@pytest.mark.parametrize("build", METHODS)
def test_mask_may_be_an_array_lists_tuples_or_an_expression(build):
    policy = build(ROWS)
    assert policy.name.startswith(f"{build.__name__}(gates=((1, 1), (0, 1), (1, 0)), ")
    given = (
        MASK.astype(np.int64),
        MASK.astype(np.int8),
        [[1, 1], [0, 1], [1, 0]],
        [np.array(row) for row in ROWS],
    )
    assert {build(gates) for gates in given} == {policy}
    for text in (
        policy.name,
        f"{build.__name__}({ROWS})",
        f"{build.__name__}(gates=[[1, 1], [0, 1], [1, 0]])",
    ):
        assert parse(text) is policy
    # for any dtype, an array's policy has a name that builds it again
    for gates in (MASK, MASK.astype(np.float32)):
        np.testing.assert_array_equal(
            head_gates.retrieval_heads(tuple(map(tuple, gates.tolist()))), MASK
        )
        assert parse(build(gates).name) is build(gates)
    assert build(((1, 1), (1, 1), (1, 0))) is not policy


def test_layer_0_is_all_retrieval_only_for_lychee_decode():
    gates = ((1, 0), (1, 1))
    with pytest.raises(
        ValueError, match=r"^gates=\(\(1, 0\), \(1, 1\)\): all heads of layer 0 must be retrieval"
    ):
        jsparse.lychee_decode(gates)
    assert jsparse.duo_attention(gates).name.startswith("duo_attention(gates=((1, 0), (1, 1)), ")


@pytest.mark.parametrize("scores", [SCORES, None], ids=["scores", "none"])
def test_file_returns_the_saved_gates(tmp_path, scores):
    record, path = (
        {"model": "tiny × 2", "steps": 3000, "loss": [0.5, None], "by": {"rank": True}},
        tmp_path / "gates",
    )
    head_gates.save(HeadGates(np.zeros((1, 1), bool), None, {"old": 1}), path)
    head_gates.save(HeadGates(MASK, scores, record), path)
    loaded = head_gates.load(str(path))
    assert loaded.retrieval.dtype == np.bool_
    np.testing.assert_array_equal(loaded.retrieval, MASK)
    assert loaded.record == record
    if scores is None:
        assert loaded.scores is None
    else:
        assert loaded.scores is not None
        assert loaded.scores.dtype == np.float32
        np.testing.assert_array_equal(loaded.scores, scores)


@pytest.mark.parametrize("build", METHODS)
def test_file_and_shipped_name_decode_like_their_mask(build, shipped, tmp_path):
    assert head_gates.shipped() == ("first", "second")
    path = str(tmp_path / "jsparse.policies" / "gates" / "second.safetensors")
    np.testing.assert_array_equal(head_gates.retrieval_heads("second"), MASK)
    np.testing.assert_array_equal(head_gates.retrieval_heads(path), MASK)
    assert parse(f"{build.__name__}('second')") is build("second")
    with pytest.raises(ValueError, match="^gates='first': is for 2 × 1 layers"):
        engine_logits(tiny_params(), build("first"), random_prompts((9,)), random_tokens(1, 2))


def test_duo_attention_matches_the_slow_model():
    """Also with streaming heads in layer 0, and a row shorter than the window."""
    sink, recent = 1, 6
    gates, prompts, forced = (
        ((0, 1), (1, 0), (0, 0)),
        random_prompts((37, 18, 3)),
        random_tokens(3, 7),
    )
    model, expected = SlowModel(tiny_params()), []
    for prompt, tokens in zip(prompts, forced, strict=True):
        row = SlowRow(model, prompt)

        def rule(layer, q, row=row):
            length = len(row.tokens)
            window = sorted({*range(min(sink, length)), *range(max(length - recent, 0), length)})
            return row.over(layer, q, [range(length) if gate else window for gate in gates[layer]])

        expected.append([row.logits, *(row.push(int(token), rule) for token in tokens[:-1])])
    expected = np.swapaxes(np.asarray(expected), 0, 1)
    policy = jsparse.duo_attention(gates, sink=sink, recent=recent)
    assert_close(
        engine_logits(tiny_params(), policy, prompts, forced, page_size=8), expected, rtol=1e-4
    )
    dense = engine_logits(tiny_params(), "dense", prompts, forced, page_size=8)
    assert np.abs(dense - expected).max() > 0.02 * np.abs(expected).max()


def test_other_masks_are_refused():
    for gates in (
        (), ((),), ((1, 1), (1,)), ((1, 2),), ((1, -1),), ((1, 0.5),), MASK[0].tolist(),
        MASK[None].tolist(), 3, None, ("11", "10"), ((float("nan"), 1),), jsparse.dense(),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^gates=.*: {IS_MASK}"):
            jsparse.duo_attention(gates)
    for gates in ([[{}]], ((1, 1j),), {}, b"mask"):
        with pytest.raises(ValueError, match=r"^gates=.*: must be a number, a string, an array"):
            jsparse.duo_attention(gates)
    for arguments, message in (
        ({"sink": -1}, "sink=-1: must be an integer of at least 0"),
        ({"recent": 0}, "recent=0: must be an integer of at least 1"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            jsparse.duo_attention(ROWS, **arguments)


@pytest.mark.parametrize("build", METHODS)
def test_gates_of_another_model_are_refused(build):
    spec = spec_of(tiny_params(), 1)
    for gates in (ROWS[:2], (*ROWS, (1, 1)), ((1,), (0,), (1,)), ((1, 1, 1, 1),) * 3):
        sizes = f"{len(gates)} × {len(gates[0])}"
        message = f"is for {sizes} layers × KV heads, must be for the model's 3 × 2"
        with pytest.raises(ValueError, match=f"^gates=.*: {message}"):
            build(gates).init(spec)


def test_wrong_files_are_refused(shipped, tmp_path):
    is_file = (
        r"must be one of first, second, which ship .*safetensors file of gates that can be read"
    )
    holds = r"must hold 'retrieval', bool \[L, K\]"
    path = tmp_path / "wrong"
    for tensors, record, message in (
        ({"scores": SCORES}, None, holds),
        ({"retrieval": MASK.astype(np.uint8)}, None, holds),
        ({"retrieval": MASK[None]}, None, holds),
        ({"retrieval": MASK[:0]}, None, holds),
        ({"retrieval": MASK, "scores": SCORES[:2]}, None, r"its 'scores' must be float32 \[3, 2\]"),
        ({"retrieval": MASK}, "{'steps': 3", is_file),
        ({"retrieval": MASK}, "[1]", "its 'record' must be a JSON object"),
    ):
        save_file(tensors, path, metadata=None if record is None else {"record": record})
        with pytest.raises(ValueError, match=f"^gates='{path}': {message}"):
            jsparse.duo_attention(str(path))
    head_gates.save(HeadGates(MASK, SCORES, {"steps": 3000}), path)
    whole = path.read_bytes()
    for size in (0, 8, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=f"^gates='{path}': {is_file}"):
            head_gates.load(str(path))
    with pytest.raises(
        ValueError, match=r"^gates='third': must be one of first, second, .*\(No such"
    ):
        jsparse.duo_attention("third")
