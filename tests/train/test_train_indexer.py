"""Training of an indexer: its loss against a slow model of the paper, and what a toy learns."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from jsparse.cli.app import app
from jsparse.evaluation.selection_mass import with_recency
from jsparse.models.indexer import load_indexer
from jsparse.policies.seer_attention import Gates
from jsparse.train.data import Source, TrainingSample
from jsparse.train.indexer import Settings, loss_of_layer, texts, train_indexer
from tests.cli.test_train_gates import TINY
from tests.support.tiny import VOCAB, tiny_params

HEADS, KV_HEADS, SIZE, BLOCK, COUNT = 4, 2, 8, 8, 40
GROUP, FREQUENCIES = HEADS // KV_HEADS, np.array([1.0, 0.3, 0.05, 0.01])
LENGTHS = 40, 29


def rotation(position):
    """RoPE of a position as a matrix; channels i and i + H/2 are a pair."""
    cos, sin = np.cos(FREQUENCIES * position), np.sin(FREQUENCIES * position)
    return np.block([[np.diag(cos), -np.diag(sin)], [np.diag(sin), np.diag(cos)]])


def softmax(x):
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def slow_measures(q, k, w_q, w_k):
    """Yields each query's KL divergence and overlap; q [T, G, H] and k [T, H] before RoPE."""
    turned = np.stack([rotation(t) @ x for t, x in enumerate(k)])
    keys = []
    for first in range(0, len(k) - len(k) % BLOCK, BLOCK):
        part = k[first : first + BLOCK]
        keys.append(
            rotation(first) @ (np.concatenate([part.max(0), part.min(0), part.mean(0)]) @ w_k)
        )
    for t in range(2 * BLOCK, len(k)):
        blocks = t // BLOCK  # complete ones before the query's own
        weights = [softmax(turned[: t + 1] @ rotation(t) @ x / SIZE**0.5) for x in q[t]]
        highest = np.max(weights, axis=0)[: blocks * BLOCK].reshape(blocks, BLOCK).max(1)
        target = highest / highest.sum()
        query = rotation(t) @ (q[t].ravel() @ w_q.reshape(-1, SIZE))
        found = softmax(np.array(keys[:blocks]) @ query / SIZE**0.5)
        best = -(-blocks // 4)
        ours, theirs = ({*np.argsort(-x)[:best]} for x in (found, target))
        yield np.sum(target * np.log(target / found)), len(ours & theirs) / best


def test_loss_is_the_divergence_from_the_highest_weights_of_blocks():
    rng = np.random.default_rng(0)
    q = 2 * rng.normal(size=(2, COUNT, HEADS, SIZE))
    k = rng.normal(size=(2, COUNT, KV_HEADS, SIZE))
    w_q = rng.normal(size=(KV_HEADS, GROUP, SIZE, SIZE)) / 4
    w_k = rng.normal(size=(KV_HEADS, 3 * SIZE, SIZE)) / 4
    turned = [
        np.stack([[x @ rotation(t).T for t, x in enumerate(row)] for row in part])
        for part in (q, k)
    ]
    gates = Gates(*(jnp.asarray(x, jnp.float32) for x in (w_q, w_k, np.zeros((2, SIZE)))))
    found = jax.jit(partial(loss_of_layer, Settings(block=BLOCK)))(
        gates,
        *(jnp.asarray(x, jnp.float32) for x in turned),
        jnp.array(LENGTHS),
        jnp.asarray(FREQUENCIES, jnp.float32),
    )
    measures = [
        measure
        for row, length in enumerate(LENGTHS)
        for head in range(KV_HEADS)
        for measure in slow_measures(
            q[row, :length, head * GROUP : (head + 1) * GROUP],
            k[row, :length, head],
            w_q[head],
            w_k[head],
        )
    ]
    np.testing.assert_allclose(found, np.mean(measures, axis=0), rtol=1e-4)


def random_texts(length=120):
    """Random ids, in texts of one length."""

    def draw(step, size):
        rng = np.random.default_rng((3, step))
        for _ in range(size):
            ids = rng.integers(VOCAB, size=length).astype(np.int32)
            yield TrainingSample(ids[:-4], ids[-4:], np.ones(4, bool))

    return Source(lambda step, size: [*draw(step, size)], 4, (length - 4,), {"source": "random"})


def test_texts_are_contexts_and_answers_in_whole_blocks():
    tokens, lengths = texts(random_texts(), Settings(block=16, batch=2), 5)
    assert tokens.shape == (2, 128) and lengths.tolist() == [120, 120]
    (context, target, _), _ = random_texts().draw(5, 2)
    np.testing.assert_array_equal(tokens[0, :120], [*context, *target])


@pytest.mark.slow
def test_toy_learns_the_blocks_that_dense_attention_weighs():
    """The toy's heads weigh near tokens most, as those of real models do."""
    params = with_recency(tiny_params(num_layers=2))
    reported = []
    settings = Settings(steps=60, batch=4, block=8, rate=1e-2, held_out=2)
    made = train_indexer(params, random_texts(), settings, lambda *step: reported.append(step))
    before, after = (made.record[name] for name in ("untrained", "trained"))
    assert before["overlap"] < 0.45
    assert after["overlap"] > before["overlap"] + 0.2
    assert after["loss"] < 0.7 * before["loss"]
    assert [nth for nth, _, _ in reported] == [*range(1, 61)]
    assert reported[-1][2] == pytest.approx(after["loss"], rel=0.3)
    assert made.block == 8


@pytest.mark.parametrize("name", ["steps", "batch", "block", "held_out"])
def test_wrong_settings_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}=0: must be at least 1"):
        Settings(**{name: 0})


def test_wrong_rates_and_short_texts_are_refused():
    with pytest.raises(ValueError, match="rate=0: must be a finite number above 0"):
        Settings(rate=0)
    with pytest.raises(ValueError, match="block=64: .* more than two blocks, .* than 120 tokens"):
        train_indexer(tiny_params(num_layers=2), random_texts(), Settings())
    short = random_texts(32)  # of questions, the contexts have a width of their own
    source = dataclasses.replace(short, buckets=(60, 120))
    with pytest.raises(ValueError, match="block=16: .* more than two blocks, .* than 32 tokens"):
        train_indexer(tiny_params(num_layers=2), source, Settings(block=16))


def run(*args):
    return CliRunner().invoke(app, ["train-indexer", "--model", TINY, *map(str, args)])


def test_command_writes_gates_and_prints_their_policy(tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "gates.safetensors"
    text.write_text("the cat sat on the mat and the dog ran to the red house. " * 20)
    keys = ["--needles", 1, "--words", 1, "--asked", 1, "--max-length", 180, "--text", text]
    ran = run("--out", out, "--steps", 2, "--block", 32, "--held-out", 1, "--no-norm", *keys)
    assert (ran.exit_code, ran.stderr) == (0, "")
    assert ran.stdout.splitlines()[-1] == f"seer_attention({str(out)!r})"
    made = load_indexer(str(out))
    assert made.block == 32 and not np.any(made.indexer.norms)
    assert made.record["data"]["min_length"] == made.record["data"]["max_length"] == 180
    assert f"overlap {made.record['trained']['overlap']:.0%}" in ran.stdout


@pytest.mark.slow
def test_command_states_that_held_out_questions_were_trained_on(tmp_path):
    context = "the cat sat on the mat and the dog ran to the red house. " * 4
    line = {"context": context, "question": "who sat?", "answer": "the cat"}
    (tmp_path / "file").write_text("\n".join([json.dumps(line)] * 4))
    given = ["--out", tmp_path / "gates", "--questions", tmp_path / "file", "--max-length", 180]
    ran = run(*given, "--block", 32, "--no-norm", "--steps", 1, "--held-out", 4)
    assert ran.exit_code == 0, ran.output
    assert "are among those of training: 5 were read, of 4." in ran.stdout


def test_mistakes_are_one_line_and_leave_no_files(tmp_path):
    out = tmp_path / "gates.safetensors"
    for args, said in [
        (["--out", tmp_path / "no" / "gates"], "must be in an existing folder"),
        (["--out", tmp_path], "must be a file, not a folder"),
        (["--out", out, "--steps", 0], "steps=0: must be at least 1"),
        (["--out", out, "--max-length", 9999], "must be at most 512 together"),
    ]:
        ran = run(*args)
        assert (ran.exit_code, ran.stdout) == (2, ""), args
        assert said in ran.stderr, args
        assert not list(tmp_path.iterdir()), args
