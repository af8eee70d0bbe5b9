"""Tests distillation: the teacher is the dense model, and the mixture matches slow float64 code.

The gates' gradient is the true one.
"""

import math
from functools import partial

import jax
import numpy as np
import pytest

from jsparse.models.transformer import to_logits
from jsparse.runtime import chunk_attention
from jsparse.runtime.scoring import dense_pass
from jsparse.train import distill
from jsparse.train.data import Source, TrainingSample
from tests.support.slow_model import SlowModel, SlowRow, attend, logits_of, softmax
from tests.support.tiny import VOCAB, assert_close, tiny_params

PARAMS = tiny_params()
LENGTHS, ANSWERS = (23, 1, 7), (5, 5, 3)
GATES = np.array([[1, 1], [0.2, 0.9], [0.5, 0.0]], np.float32)


def random_samples():
    rng = np.random.default_rng(3)
    for length, answer in zip(LENGTHS, ANSWERS, strict=True):
        context, target = (rng.integers(VOCAB, size=n).astype(np.int32) for n in (length, answer))
        yield TrainingSample(context, target, np.ones(answer, bool))


SAMPLES = [*random_samples()]


def batch_of(width):
    return Source(lambda step, size: SAMPLES, max(ANSWERS), (width,), {}).batch(0, len(SAMPLES))


@jax.jit
def taught(batch):
    return distill.teacher_cache(PARAMS.decoder, PARAMS.weights, batch, "logits")


@pytest.fixture(scope="module")
def given():
    """Prefills contexts in three chunks; the shorter rows have no tokens in the last two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_attention, "chunk_tokens", lambda *_: 16)
        return taught(batch_of(40))


@partial(jax.jit, static_argnames=("keep", "match", "sets"))
def student(gates, given, keep=0.3, match="logits", sets="handed_on"):
    return distill.predictions(
        PARAMS.decoder, PARAMS.weights, given, gates, keep=keep, match=match, sets=sets
    )


measured = jax.jit(distill.distance)
attention = jax.jit(distill.attention, static_argnums=6)
head = jax.jit(partial(to_logits, PARAMS.decoder))


def distance(gates, given, keep=0.3, match="logits"):
    return float(measured(student(gates, given, keep, match), given))


@jax.jit
@jax.grad
def gradient(gates, given):
    return distill.distance(student(gates, given), given)


def assert_rows_close(actual, expected, **at):
    """Compares rows at scored tokens."""
    for row, answer in enumerate(ANSWERS):
        assert_close(np.asarray(actual)[row, :answer], expected[row][:answer], row=row, **at)


# the teacher


def test_teacher_is_a_full_pass_over_context_and_target(given):
    texts = [np.concatenate(sample[:2]) for sample in SAMPLES]
    whole = np.stack([np.pad(text, (0, 32 - len(text))) for text in texts])
    expected = np.asarray(dense_pass(PARAMS.decoder, PARAMS.weights, whole))
    assert_rows_close(
        given.outputs, [row[length - 1 :] for row, length in zip(expected, LENGTHS, strict=True)]
    )
    assert given.context_lengths.tolist() == [length - 1 for length in LENGTHS]


# the student


@pytest.mark.slow
def test_heads_with_full_sets_have_distance_zero(given):
    for keep, gates in [(0.3, np.ones_like(GATES)), (1.0, GATES), (1.0, np.zeros_like(GATES))]:
        assert distance(gates, given, keep) < 1e-9, keep
    assert distance(np.zeros_like(GATES), given) > 0.01


@pytest.mark.parametrize(
    ("gates", "ways"),
    [
        (GATES, "handed_on"),
        (np.round(GATES), "handed_on"),
        (GATES, "refreshed"),
        (GATES, "streaming"),
    ],
)
def test_predictions_match_the_slow_model(given, gates, ways, monkeypatch):
    """A head hands on its best slots for each token.

    If sets are handed on, a head below one half hands on its inherited set. Streaming heads attend
    to the first and newest slots.
    """
    model, keep = SlowModel(PARAMS), 0.3
    monkeypatch.setattr(distill, "SINK", 2)
    monkeypatch.setattr(distill, "RECENT", 3)
    outputs = np.asarray(student(gates, given, keep, sets=ways))
    for at, sample in enumerate(SAMPLES):
        row, sets = SlowRow(model, sample.context[:-1].tolist()), []

        def rule(layer, q, row=row, sets=sets):
            full = row.dense(layer, q)
            o = full
            if ways == "streaming":
                slots = range(len(row.k[layer][0]))
                sets[:] = [[slot for slot in slots if slot < 2 or slot >= len(slots) - 3]] * 2
            if layer:
                z = np.repeat(gates[layer], row.group)[:, None]
                o = z * full + (1 - z) * np.stack(row.over(layer, q, sets))
            picked = [
                best(logits_of(row.mean_query(q, head), row.k[layer][head]), keep)
                for head in range(len(row.k[layer]))
            ]
            if ways == "streaming":
                return list(o)
            passing = [bool(layer) and ways == "handed_on" and z < 0.5 for z in gates[layer]]
            sets[:] = [(sets if passes else picked)[head] for head, passes in enumerate(passing)]
            return list(o)

        tokens = [sample.context[-1], *sample.target[:-1]]
        assert_close(
            outputs[at, : len(tokens)], [row.push(int(token), rule) for token in tokens], row=at
        )


def best(logits, keep):
    """Returns the slots of the best ceil(keep · n), the first among equals, and the last slot."""
    count = math.ceil(np.float32(keep) * np.float32(len(logits)))
    return sorted(
        {*np.argsort(-np.asarray(logits), kind="stable")[:count].tolist(), len(logits) - 1}
    )


@pytest.mark.slow
def test_hidden_states_are_compared_before_the_head(given):
    logits = partial(head, PARAMS.weights)
    teacher = given._replace(outputs=student(None, given, match="hidden"))
    assert teacher.outputs.shape == (len(SAMPLES), max(ANSWERS), PARAMS.config.hidden_size)
    assert_rows_close(logits(teacher.outputs), given.outputs)
    assert_rows_close(logits(student(GATES, teacher, match="hidden")), student(GATES, given))
    assert distance(np.ones_like(GATES), teacher, match="hidden") < 1e-9
    assert distance(GATES, teacher, match="hidden") > 0.01


def moved(place, step):
    gates = GATES.copy()
    gates[place] += step
    return gates


@pytest.mark.slow
def test_gates_of_the_first_layer_have_no_effect(given):
    assert distance(moved(0, -1), given) == distance(GATES, given)
    np.testing.assert_array_equal(np.asarray(gradient(GATES, given))[0], 0)


def test_gradients_match_finite_differences(given):
    """With three layers no set depends on the gates, so that the distance is smooth."""
    slope, step = np.asarray(gradient(GATES, given)), 0.02
    for place in ((1, 0), (1, 1), (2, 0)):
        ends = [distance(moved(place, sign * step), given) for sign in (1, -1)]
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(float(slope[place]), rel=0.02), (
            place
        )


# one layer's attention

B, T, K, GROUP, S, H = 2, 4, 2, 2, 9, 16
HELD = (9, 3)


def seen_slots(row, step):
    return [*range(HELD[row]), *range(S, S + step + 1)]


def slow_attention(q, k, v, z, inherited, keep):
    """Returns the output and the handed-on mask, one query at a time."""
    out, sets = np.zeros((B, T, K * GROUP, H)), np.zeros((B, K, T, S + T), bool)
    for row, step, head in np.ndindex(B, T, K):
        seen = seen_slots(row, step)
        queries = q[row, step, head * GROUP : (head + 1) * GROUP].astype(np.float64)
        for n, query in enumerate(queries, head * GROUP):
            out[row, step, n] = attend(query, k[row, head, seen], v[row, head, seen])
            if inherited is not None:
                few = np.flatnonzero(inherited[row, head, step])
                sparse = softmax(logits_of(query, k[row, head, few])) @ v[row, head, few]
                out[row, step, n] = z[head] * out[row, step, n] + (1 - z[head]) * sparse
        picked = best(logits_of(queries.mean(axis=0), k[row, head, seen]), keep or 1)
        sets[row, head, step, np.array(seen)[picked]] = True
    return out, sets


@pytest.mark.parametrize(
    ("keep", "mixed", "ties"), [(0.3, True, True), (0.25, False, False), (None, True, False)]
)
def test_attention_matches_the_slow_one(keep, mixed, ties):
    rng = np.random.default_rng(5)
    draw = partial(rng.integers, -1, 2) if ties else lambda size: rng.normal(size=size)
    q, k, v = (
        np.float32(draw(size=size)) for size in ((B, T, K * GROUP, H), *[(B, K, S + T, H)] * 2)
    )
    inherited, z = None, np.float32([0.3, 0.0])
    if mixed:
        inherited = np.zeros((B, K, T, S + T), bool)
        for row, step in np.ndindex(B, T):
            slots = seen_slots(row, step)
            inherited[row, :, step, slots] = (rng.random((len(slots), K)) < 0.3) | (
                np.array(slots) == S + step
            )[:, None]
    o, handed = attention(q, k, v, np.int32(HELD), z if mixed else None, inherited, keep)
    expected, sets = slow_attention(q, k, v, z, inherited, keep)
    assert_close(o, expected, rtol=1e-5)
    if keep is None:
        assert handed is None
    else:
        np.testing.assert_array_equal(handed, sets)


# the distance


def cache_of(outputs, scored):
    return distill.TeacherCache(
        (), np.zeros(2, np.int32), np.zeros((2, 3), np.int32), np.float32(outputs), scored
    )


def test_distance_is_a_share_of_the_teachers_variance_by_row():
    rng = np.random.default_rng(6)
    teacher, outputs = 5 + 3 * rng.normal(size=(2, 2, 3, 8))
    scored = np.array([[True, False, True], [False, True, False]])
    rows = [(teacher[row][scored[row]], outputs[row][scored[row]]) for row in range(2)]
    expected = np.mean([((y - x) ** 2).mean() / x.var() for x, y in rows])
    for scale in (1, 100):
        given = cache_of(scale * teacher, scored)
        assert measured(scale * np.float32(outputs), given) == pytest.approx(expected, rel=1e-5)
    outputs[~scored] = 1e6
    assert measured(np.float32(outputs), cache_of(teacher, scored)) == pytest.approx(
        expected, rel=1e-5
    )
