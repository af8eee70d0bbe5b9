"""Gates: the mask and the files that say which KV heads are retrieval heads, and DuoAttention,
which reads them too.
"""

import json
from functools import partial

import numpy as np
import pytest
from safetensors.numpy import save_file

import jsparse
from jsparse.policies import head_gates
from jsparse.policies.expressions import parse
from jsparse.policies.head_gates import HeadGates
from tests.support.marks import slow_except
from tests.support.slow_model import SlowModel, SlowRow
from tests.support.tiny import (
    assert_close,
    engine_logits,
    random_prompts,
    random_tokens,
    tiny_params,
)

MASK = np.array([[True, True], [False, True], [True, False]])
ROWS = ((1, 1), (0, 1), (1, 0))
SCORES = np.linspace(0, 1, 6, dtype=np.float32).reshape(3, 2)
METHODS = [jsparse.lychee_decode, jsparse.duo_attention]
IS_MASK = "must be a name, a path, or 0 and 1 for every layer and KV head"


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """Two files that ship: "first" has no scores, and of its heads only layer 0's are retrieval
    heads.
    """
    monkeypatch.setattr(head_gates, "files", lambda package: tmp_path / package)
    folder = tmp_path / "jsparse.policies" / "gates"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("not gates")
    head_gates.save(HeadGates(MASK, SCORES), folder / "second.safetensors")
    head_gates.save(HeadGates(np.array([[True], [False]])), folder / "first.safetensors")


@pytest.mark.parametrize("build", METHODS)
def test_a_mask_may_be_an_array_lists_tuples_or_an_expression(build):
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
    # whatever the type of its numbers, an array's policy has a name that builds it again
    for gates in (MASK, MASK.astype(np.float32)):
        np.testing.assert_array_equal(
            head_gates.retrieval_heads(tuple(map(tuple, gates.tolist()))), MASK
        )
        assert parse(build(gates).name) is build(gates)
    assert build(((1, 1), (1, 1), (1, 0))) is not policy


@pytest.mark.parametrize(
    "gates",
    [
        (), [], ((),), ((), ()), ((1, 1), (1,)), [[1], [1, 0]], ((1, 2),), ((1, -1),),
        ((1, 0.5),), MASK[0].tolist(), MASK[None].tolist(), 3, 1.0, None, ("11", "10"),
        [["1", "0"]], ((float("nan"), 1),), jsparse.dense(),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("build", METHODS)
def test_other_masks_are_refused(build, gates):
    with pytest.raises(ValueError, match=f"^gates=.*: {IS_MASK}"):
        build(gates)


@pytest.mark.parametrize("gates", [[[{}]], [{1}], ((1, 1j),), [[b"1"]], {}, b"mask", 1j], ids=str)
@pytest.mark.parametrize("build", METHODS)
def test_what_no_name_can_spell_is_refused(build, gates):
    with pytest.raises(
        ValueError, match="^gates=.*: must be a number, a string, an array of numbers or a policy$"
    ):
        build(gates)


def test_layer_0_is_all_retrieval_for_lychee_decode_alone():
    gates = ((1, 0), (1, 1))
    with pytest.raises(
        ValueError, match=r"^gates=\(\(1, 0\), \(1, 1\)\): all heads of layer 0 must be retrieval"
    ):
        jsparse.lychee_decode(gates)
    assert jsparse.duo_attention(gates).name.startswith("duo_attention(gates=((1, 0), (1, 1)), ")


@pytest.mark.parametrize(
    "gates", [ROWS[:2], (*ROWS, (1, 1)), ((1,), (0,), (1,)), ((1, 1, 1, 1),) * 3], ids=len
)
@pytest.mark.parametrize("build", METHODS)
def test_gates_of_another_model_are_refused_before_the_prompt_is_read(build, gates):
    sizes = f"{len(gates)} × {len(gates[0])}"
    with pytest.raises(
        ValueError,
        match=f"^gates=.*: is for {sizes} layers × KV heads, must be for the model's 3 × 2",
    ):
        engine_logits(tiny_params(), build(gates), random_prompts((9,)), random_tokens(1, 2))


@pytest.mark.parametrize("scores", [SCORES, None])
def test_a_file_gives_back_what_was_saved(tmp_path, scores):
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


def test_what_is_saved_may_lie_in_memory_as_it_likes(tmp_path):
    path = str(tmp_path / "gates")
    head_gates.save(HeadGates(np.asfortranarray(MASK), SCORES.T.astype(np.float64).T), path)
    loaded = head_gates.load(path)
    np.testing.assert_array_equal(loaded.retrieval, MASK)
    assert loaded.scores is not None
    np.testing.assert_array_equal(loaded.scores, SCORES)
    assert loaded.record == {}


def test_a_file_without_a_record_has_an_empty_one(tmp_path):
    path = str(tmp_path / "gates.safetensors")
    save_file({"retrieval": MASK}, path)
    assert head_gates.load(path).record == {}


@pytest.mark.parametrize("build", METHODS)
def test_a_file_and_a_shipped_name_decode_as_their_mask_does(build, shipped, tmp_path):
    assert head_gates.shipped() == ("first", "second")
    path = str(tmp_path / "jsparse.policies" / "gates" / "second.safetensors")
    np.testing.assert_array_equal(head_gates.retrieval_heads("second"), MASK)
    np.testing.assert_array_equal(head_gates.retrieval_heads(path), MASK)
    assert parse(f"{build.__name__}('second')") is build("second")
    with pytest.raises(ValueError, match="^gates='first': is for 2 × 1 layers"):
        engine_logits(tiny_params(), build("first"), random_prompts((9,)), random_tokens(1, 2))


@pytest.mark.parametrize("build", METHODS)
def test_an_unknown_name_lists_what_ships(build, shipped):
    with pytest.raises(
        ValueError,
        match=r"^gates='third': must be one of first, second, which ship .*\(No such file",
    ):
        build("third")


def wrong_tensors(arrays, path, record=None):
    save_file(arrays, path, metadata=None if record is None else {"record": record})


def eight_bit_floats(path):
    """Tensors of a type that numpy lacks."""
    header = json.dumps(
        {"retrieval": {"dtype": "F8_E4M3", "shape": [3, 2], "data_offsets": [0, 6]}}
    ).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(6))


IS_FILE = (
    "must be one of .*, which ship with jsparse, or a safetensors file of gates that can be read"
)
HOLDS = r"must hold 'retrieval', bool \[L, K\]"
HAS_SCORES = r"its 'scores' must be float32 \[3, 2\], like 'retrieval'"
WRONG_FILES = {
    "nothing": (lambda path: None, IS_FILE),
    "a folder": (lambda path: path.mkdir(), IS_FILE),
    "empty": (lambda path: path.write_bytes(b""), IS_FILE),
    "text": (lambda path: path.write_text("retrieval: yes, all of them"), IS_FILE),
    "8-bit floats": (eight_bit_floats, IS_FILE),
    "no retrieval": (partial(wrong_tensors, {"scores": SCORES}), HOLDS),
    "floats": (partial(wrong_tensors, {"retrieval": MASK.astype(np.float32)}), HOLDS),
    "integers": (partial(wrong_tensors, {"retrieval": MASK.astype(np.uint8)}), HOLDS),
    "one axis": (partial(wrong_tensors, {"retrieval": MASK.reshape(-1)}), HOLDS),
    "three axes": (partial(wrong_tensors, {"retrieval": MASK[None]}), HOLDS),
    "no layers": (partial(wrong_tensors, {"retrieval": MASK[:0]}), HOLDS),
    "no heads": (partial(wrong_tensors, {"retrieval": MASK[:, :0]}), HOLDS),
    "scores of 64 bits": (
        partial(wrong_tensors, {"retrieval": MASK, "scores": SCORES.astype(np.float64)}),
        HAS_SCORES,
    ),
    "other scores": (partial(wrong_tensors, {"retrieval": MASK, "scores": SCORES[:2]}), HAS_SCORES),
    "damaged record": (partial(wrong_tensors, {"retrieval": MASK}, record="{'steps': 3"), IS_FILE),
    "record of another kind": (
        partial(wrong_tensors, {"retrieval": MASK}, record="[1]"),
        "its 'record' must be a JSON object",
    ),
}


@pytest.mark.parametrize("kind", WRONG_FILES)
def test_wrong_files_are_refused(kind, tmp_path):
    write, message = WRONG_FILES[kind]
    path = tmp_path / "wrong"
    write(path)
    for build in METHODS:
        with pytest.raises(ValueError, match=f"^gates='{path}': {message}"):
            build(str(path))


def test_truncated_files_are_refused(tmp_path):
    path = tmp_path / "gates"
    head_gates.save(HeadGates(MASK, SCORES, {"steps": 3000}), path)
    whole = path.read_bytes()
    for size in (4, 8, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=f"^gates='{path}': {IS_FILE}"):
            head_gates.load(str(path))


@pytest.mark.parametrize("sizes", slow_except(((0, 1), (1, 6), (9, 5)), (1, 6)))
def test_duo_attention_equals_the_slow_model(sizes):
    sink, recent = sizes
    """Streaming heads in layer 0 too; a row that is shorter than the window."""
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sink": -1}, "sink=-1: must be an integer of at least 0"),
        ({"sink": 4.0}, "sink=4.0: must be an integer of at least 0"),
        ({"recent": 0}, "recent=0: must be an integer of at least 1"),
        ({"recent": True}, "recent=True: must be an integer of at least 1"),
    ],
)
def test_duo_attention_refuses_other_windows(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        jsparse.duo_attention(ROWS, **arguments)
