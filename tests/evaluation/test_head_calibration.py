"""Echo and induction scores against materialised attention, and the choice of heads."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import jsparse
from jsparse.cli.app import app
from jsparse.evaluation import head_calibration
from jsparse.evaluation.head_calibration import HeadScores, head_scores
from jsparse.policies import head_gates
from jsparse.runtime import chunk_attention
from tests.support.slow_model import SlowModel, SlowRow, logits_of, softmax
from tests.support.tiny import random_prompts, tiny_params

MODEL = str(Path(__file__).parents[1] / "fixtures" / "hf" / "llama3" / "model.gguf")


def slow_scores(row, period):
    """Tang et al., section 3.2, from each query head's attention matrix."""
    shape = len(row.k), len(row.k[0])
    echo, induction = np.zeros((2, *shape))
    for layer, head in np.ndindex(*shape):
        for n in range(head * row.group, (head + 1) * row.group):
            means = np.zeros(2)
            queries = range(period, len(row.tokens))
            for i in queries:
                a = softmax(logits_of(row.q[layer][i][n], row.k[layer][head][: i + 1]))
                earlier = [j for j in range(i) if row.tokens[j] == row.tokens[i]]
                means += np.array([sum(a[j] for j in earlier), sum(a[j + 1] for j in earlier)])
            means /= len(queries)
            echo[layer, head] = max(echo[layer, head], means[0])
            induction[layer, head] = max(induction[layer, head], means[1])
    return HeadScores(echo, induction)


def test_scores_are_the_attention_to_earlier_occurrences(monkeypatch):
    """With chunks of 16 tokens, across which tokens repeat, the last one padded."""
    monkeypatch.setattr(chunk_attention, "chunk_tokens", lambda *_: 16)
    monkeypatch.setattr(head_calibration, "BLOCK", 8)
    period, params = 9, tiny_params()
    ids = sorted({*random_prompts((40,))[0]})[:period] * 4
    found = head_scores(params, ids, period)
    expected = slow_scores(SlowRow(SlowModel(params), ids), period)
    for name, scores in expected._asdict().items():
        assert scores.std() > 0.01 * scores.mean()
        np.testing.assert_allclose(getattr(found, name), scores, rtol=1e-4, err_msg=name)


def made(monkeypatch, **options):
    """The gates that these scores give; induction ranks heads from last to first, echo by layer."""
    induction = np.float32([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    echo = np.float32([[0.08, 0.02], [0.04, 0.02], [0.02, 0.02]])
    monkeypatch.setattr(
        head_calibration, "head_scores", lambda *_, **__: HeadScores(echo, induction)
    )
    return jsparse.calibrate_heads(tiny_params(), tokens=5, **options)


def test_best_heads_of_either_score_are_chosen(monkeypatch):
    gates = made(monkeypatch, induction=0.34, echo=0.17)
    np.testing.assert_array_equal(gates.retrieval, [[1, 0], [0, 0], [1, 1]])
    np.testing.assert_allclose(gates.scores, [[1, 0.4], [0.6, 0.8], [1, 1.2]], rtol=1e-6)
    assert gates.record["scores"]["echo"][0][1] == pytest.approx(0.02)
    gates = made(monkeypatch, induction=0.34, echo=0.0)
    np.testing.assert_array_equal(gates.retrieval, [[0, 0], [0, 0], [1, 1]])
    gates = made(monkeypatch, induction=0.0, echo=0.34, first_layer=True)
    np.testing.assert_array_equal(gates.retrieval, [[1, 1], [1, 0], [0, 0]])
    jsparse.lychee_decode(gates.retrieval)


def test_tokens_differ_and_repeat_four_times(monkeypatch):
    seen = []

    def scores(params, ids, period, on_progress):
        seen.append((ids, period))
        return HeadScores(*np.ones((2, 3, 2), np.float32))

    monkeypatch.setattr(head_calibration, "head_scores", scores)
    for seed in (0, 0, 1):
        jsparse.calibrate_heads(tiny_params(), tokens=31, seed=seed)
    (ids, period), again, other = seen
    assert (len(ids), period, len({*ids})) == (124, 31, 31)
    assert ids == ids[:31] * 4
    assert again == (ids, 31) and other != again


def test_wrong_arguments_are_refused():
    for arguments, message in (
        ({"tokens": 1}, "tokens=1: must be an integer of at least 2"),
        ({"tokens": 10**6}, "tokens=1000000: must be at most .*, since 4 repetitions must fit"),
        ({"induction": 1.5}, "induction=1.5: must be a number from 0 to 1"),
        ({"echo": -1}, "echo=-1: must be a number from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            jsparse.calibrate_heads(tiny_params(), **arguments)
    with pytest.raises(ValueError, match="^params='smollm2': must be what jsparse.load returned"):
        jsparse.calibrate_heads("smollm2")  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_command_writes_a_file_that_policies_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["calibrate-heads", "--model", MODEL, "--induction", "0.25", "--first-layer"]
    ran = CliRunner().invoke(app, [*command, "--tokens", "20", "--out", "heads"])
    assert ran.exit_code == 0, ran.output
    gates = head_gates.load("heads")
    assert ran.stdout == (
        f"{gates.retrieval.sum()} of 4 KV heads are retrieval heads:\nrazor_attention('heads')\n"
    )
    assert gates.retrieval[0].all()
    wanted = jsparse.calibrate_heads(
        jsparse.load(MODEL), tokens=20, induction=0.25, first_layer=True
    )
    np.testing.assert_array_equal(gates.retrieval, wanted.retrieval)
    for build in (jsparse.razor_attention, jsparse.duo_attention, jsparse.lychee_decode):
        build("heads")
    ran = CliRunner().invoke(app, [*command, "--out", "no/such"])
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert "in an existing folder" in ran.stderr
