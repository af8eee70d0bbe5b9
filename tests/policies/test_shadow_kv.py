"""Tests ShadowKV against a slow numpy model with the paper's singular value decomposition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsparse
from jsparse.policies.shadow_kv import landmarks_of, low_rank, shadow_kv
from tests.support.slow_model import SlowModel, SlowRow, attend, softmax
from tests.support.tiny import (
    assert_close,
    engine_logits,
    random_prompts,
    random_tokens,
    tiny_params,
)

PAGE, RANK, CHUNK, OUTLIERS, RECENT, BUDGET = 8, 12, 3, 2, 4, 9
PROMPTS, FORCED = random_prompts((37, 30)), random_tokens(2, 8)


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


class SlowShadow:
    """The rule of one row, built at the end of its prompt."""

    def __init__(self, row, rank=RANK):
        c, self.row = row.model.config, row
        self.length = len(row.tokens)
        self.chunks = (self.length - RECENT) // CHUNK
        self.keys, self.landmarks, self.outliers = [], [], []
        for layer in range(c.num_layers):
            held = np.array(row.k[layer])  # [K, S, H]
            before = [
                np.concatenate([row.model.rotate(k[slot], -slot) for k in held])
                for slot in range(self.length)
            ]
            u, s, vt = np.linalg.svd(np.array(before), full_matrices=False)
            low = (u[:, :rank] * s[:rank]) @ vt[:rank]
            heads = np.split(low, c.num_kv_heads, axis=1)
            self.keys.append(
                [[row.model.rotate(k[slot], slot) for slot in range(self.length)] for k in heads]
            )
            by_chunk = held[:, : self.chunks * CHUNK].reshape(len(held), -1, CHUNK, c.head_dim)
            self.landmarks.append(by_chunk.mean(2))
            likeness = [
                [min(cosine(chunk.mean(0), k) for k in chunk) for chunk in head]
                for head in by_chunk
            ]
            self.outliers.append([np.argsort(head)[:OUTLIERS].tolist() for head in likeness])

    def rule(self, layer, q):
        out, group = [], self.row.group
        for head in range(len(self.outliers[layer])):
            queries = q[head * group : (head + 1) * group]
            rest = [c for c in range(self.chunks) if c not in self.outliers[layer][head]]
            landmarks = self.landmarks[layer][head][rest]
            weights = [softmax(landmarks @ query / len(query) ** 0.5) for query in queries]
            best = np.argsort(np.max(weights, axis=0))[::-1][: BUDGET // CHUNK]
            keys, values = list(self.row.k[layer][head]), self.row.v[layer][head]
            slots = [*range(self.chunks * CHUNK, len(keys))]
            slots += self.slots_of(self.outliers[layer][head])
            for slot in self.slots_of([rest[i] for i in best]):
                keys[slot] = self.keys[layer][head][slot]
                slots.append(slot)
            out += [
                attend(query, [keys[slot] for slot in slots], [values[slot] for slot in slots])
                for query in queries
            ]
        return out

    def slots_of(self, chunks):
        return [chunk * CHUNK + nth for chunk in chunks for nth in range(CHUNK)]


def decoded(policy):
    return engine_logits(
        tiny_params(num_layers=2), policy, PROMPTS, FORCED, page_size=PAGE, max_length=64
    )


@pytest.fixture(scope="module")
def found():
    return decoded(shadow_kv(BUDGET, RANK, CHUNK, OUTLIERS, RECENT))


@pytest.mark.parametrize("row", [0, 1])
def test_decoding_matches_the_slow_model(found, row):
    """Ragged rows, groups of query heads, chunks that pages cut, and new tokens."""
    slow = SlowRow(SlowModel(tiny_params(num_layers=2)), PROMPTS[row])
    shadow = SlowShadow(slow)
    expected = [slow.logits, *(slow.push(token, shadow.rule) for token in FORCED[row][:-1])]
    assert_close(found[:, row], np.array(expected), rtol=1e-3)


@pytest.mark.slow
def test_all_channels_and_chunks_equal_dense_attention():
    """With rows above the budget, so that keys are restored."""
    policy = shadow_kv(budget=27, rank=2**20, chunk=CHUNK, outliers=12, recent=RECENT)
    assert_close(decoded(policy), decoded("dense"), rtol=1e-3)


def test_selected_chunks_read_values_alone():
    """One outlier, six newest tokens, and two chunks with restored keys: half of their bytes."""
    policy = shadow_kv(budget=16, rank=8, chunk=8, outliers=1, recent=5)
    prompt = random_prompts([61])[0]
    made = jsparse.generate(tiny_params(num_layers=2), prompt, policy=policy, max_new_tokens=2)
    assert made.stats.attended_fraction == pytest.approx((8 + 6 + 16) / 62)
    assert made.stats.read_fraction == pytest.approx((8 + 6 + 16 / 2) / 62)


def test_low_rank_keys_are_the_nearest_of_their_rank():
    rng = np.random.default_rng(0)
    frequencies = np.float32([1.0, 0.3, 0.05, 0.01])
    k = rng.normal(size=(2, 3, 20, 8)) * np.linspace(3, 0.1, 8)
    turn = jax.jit(lambda k: low_rank(k, jnp.array([20, 13]), jnp.asarray(frequencies), 5))
    coefficients, basis = map(np.asarray, turn(np.float32(k)))
    angles = -np.arange(20)[:, None] * frequencies
    low, high = np.split(k, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    before = np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    for row, length in enumerate((20, 13)):
        flat = before[row, :, :length].swapaxes(0, 1).reshape(length, -1)
        u, s, vt = np.linalg.svd(flat, full_matrices=False)
        nearest = (u[:, :5] * s[:5]) @ vt[:5]
        restored = np.einsum("sr,khr->skh", coefficients[row, :length], basis[row])
        np.testing.assert_allclose(restored.reshape(length, -1), nearest, atol=1e-3)


def test_a_chunk_is_as_like_its_landmark_as_its_least_similar_key():
    rng = np.random.default_rng(1)
    k = rng.normal(size=(1, 2, 12, 4))
    means, likeness = map(np.asarray, jax.jit(lambda k: landmarks_of(k, 3))(np.float32(k)))
    for head in range(2):
        for chunk in range(4):
            own = k[0, head, 3 * chunk : 3 * chunk + 3]
            np.testing.assert_allclose(means[0, head, chunk], own.mean(0), rtol=1e-5)
            least = min(cosine(own.mean(0), key) for key in own)
            np.testing.assert_allclose(likeness[0, head, chunk], least, rtol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": 7}, "budget=7: must be an integer of at least 8"),
        ({"rank": 0}, "rank=0: must be an integer of at least 1"),
        ({"chunk": 0}, "chunk=0: must be an integer of at least 1"),
        ({"outliers": 0}, "outliers=0: must be an integer of at least 1"),
        ({"recent": 0}, "recent=0: must be an integer of at least 1"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        shadow_kv(**arguments)
