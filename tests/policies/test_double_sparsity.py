"""Tests Double Sparsity against a slow numpy model: heavy channels, labels and selections; and
calibration files.
"""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

import jsparse
from jsparse import cache as kv_cache
from jsparse.cache import LayerCache, StepView, read_heads
from jsparse.cache.key_constants import KEY_CONSTANTS, frame_at, into_frame
from jsparse.cli.app import app
from jsparse.pallas_kernels.int4_keys import dequantise, quantise
from jsparse.policies import channel_ranking
from jsparse.policies.double_sparsity import double_sparsity, key_magnitudes
from jsparse.runtime import chunk_attention
from jsparse.runtime.session import Session
from jsparse.text import prompts
from tests.support.marks import slow_except
from tests.support.slow_model import SlowModel, SlowRow, softmax
from tests.support.tiny import (
    no_constants,
    random_prompts,
    read_only,
    spec_of,
    tiny_params,
)

LAYERS, K, H, GROUP, PAGE = 2, 2, 16, 2, 8
PROMPTS = random_prompts((37, 9))
MODEL = str(Path(__file__).parents[1] / "fixtures" / "hf" / "llama3" / "model.gguf")


@pytest.fixture(scope="module")
def ranking():
    """A different order of the channels in every layer and head."""
    return np.random.default_rng(5).permuted(
        np.tile(np.arange(H, dtype=np.int32), (LAYERS, K, 1)), axis=-1
    )


@pytest.fixture(scope="module")
def file(ranking, tmp_path_factory):
    path = tmp_path_factory.mktemp("calibration") / "heavy.safetensors"
    channel_ranking.save(ranking, path)
    return str(path)


def primed(policy, prompts=PROMPTS, *, chunk=512, num_pages=8):
    """Cache and state after the prompts, prefilled in chunks of `chunk`."""
    params = tiny_params(LAYERS)
    spec = spec_of(params, len(prompts), page_size=PAGE, num_pages=num_pages)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_attention, "chunk_tokens", lambda *_: chunk)
        session = Session(params, policy, spec)
        session.prefill(prompts)
    return session.prefilled.cache, session.prefilled.state


def seen(cache):
    """The view of the cache that hooks get."""
    return StepView(cache, read_only(tiny_params(LAYERS), "double_sparsity").constants)


def frame(layer, head, spans):
    """The frame of one head, in float64: R(span)·mid of these spans, and the range by channel."""
    constants = read_only(tiny_params(LAYERS), "double_sparsity").constants
    assert constants is not None
    mid, half, frequencies = (np.asarray(constants[name], np.float64) for name in KEY_CONSTANTS)
    low, high = np.split(mid[layer, head], 2)
    angles = np.outer(spans * 128, frequencies)
    cos, sin = np.cos(angles), np.sin(angles)
    turned = np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return turned, np.tile(half[layer, head], 2)


def framed(k, cache, layer, head):
    """Keys [n, H] of one head from its first slot on, in the frame."""
    turned, half = frame(layer, head, np.arange(len(k)) // 128)
    return (k - turned) / half


def keys_of(cache, layer, row, head):
    """K of one head in the frame of the model's constants, in float64."""
    held = cache.layers[layer]
    k = np.asarray(read_heads(held.k, held))[row, head, : int(held.lengths[row, head])]
    return framed(k.astype(np.float64), cache, layer, head)


def heaviest(weights, count):
    """The channels of largest weight, ascending."""
    return sorted(sorted(range(len(weights)), key=lambda d: -weights[d])[:count])


def labelled(key):
    """Rounds one token's channels to four bits, with scale and smallest channel in float16."""
    key = np.asarray(key, np.float64)
    minimum, step = np.float16(key.min()), np.float16((key.max() - key.min()) / 15)
    step = float(step) or 1.0
    return np.array([np.clip(np.rint((x - minimum) / step), 0, 15) * step + minimum for x in key])


def heads_of(state):
    """(layer, row, head) of all heads in a state."""
    return [
        (layer, *at)
        for layer in range(len(state))
        for at in np.ndindex(state[layer].channels.shape[:2])
    ]


def assert_labels_are_of_the_cache(cache, state):
    """Bit for bit, for all held slots."""
    for layer, held in enumerate(cache.layers):
        wanted = labels_of(cache, layer, state[layer].channels)
        there = np.arange(held.capacity) < np.asarray(held.lengths)[..., None]
        for pool, part in zip(state[layer].keys, wanted, strict=True):
            np.testing.assert_array_equal(read_heads(pool, held)[there], part[there])


@partial(jax.jit, static_argnames=("layer",))
def labels_of(cache, layer, channels):
    """The labels of all slots, from the cached keys."""
    held = cache.layers[layer]
    slots = jnp.broadcast_to(jnp.arange(held.capacity), (*held.lengths.shape, held.capacity))
    k = into_frame(read_heads(held.k, held), frame_at(seen(cache), layer), slots)
    return quantise(jnp.take_along_axis(k, channels[:, :, None], axis=-1))


def test_channels_are_those_of_the_largest_products():
    channels = 6
    cache, state = primed(double_sparsity(channels=channels))
    rows = [SlowRow(SlowModel(tiny_params(LAYERS)), prompt) for prompt in PROMPTS]
    for layer, row, head in heads_of(state):
        last = np.array(rows[row].q[layer][-32:])[:, head * GROUP : (head + 1) * GROUP]
        _, half = frame(layer, head, np.zeros(1))
        weights = np.abs(keys_of(cache, layer, row, head)).mean(0) * np.abs(last * half).sum((0, 1))
        assert state[layer].channels[row, head].tolist() == heaviest(weights, channels)
    chosen = {
        tuple(state[layer].channels[row, head].tolist()) for layer, row, head in heads_of(state)
    }
    assert len(chosen) > LAYERS  # heads and rows have different ones


def test_labels_are_the_channels_in_four_bits(file, ranking):
    cache, state = primed(double_sparsity(channels=6, calibration=file))
    for layer, row, head in heads_of(state):
        channels = state[layer].channels[row, head].tolist()
        assert channels == sorted(ranking[layer, head, :6].tolist())
        k = keys_of(cache, layer, row, head)[:, channels]
        held = cache.layers[layer]
        labels = np.asarray(dequantise(*(read_heads(pool, held) for pool in state[layer].keys)))[
            row, head, : len(k)
        ]
        np.testing.assert_allclose(labels, [labelled(key) for key in k], rtol=1e-3, atol=1e-3)
        step = (k.max(axis=1) - k.min(axis=1)) / 15
        assert (np.abs(labels - k).max(axis=1) <= step / 2 + 2.0**-10 * np.abs(k).max(axis=1)).all()


def best(cache, layer, row, head, channels, q, budget, granularity):
    """The best tokens or pages of one head for its group's queries, by a slow ranking."""
    labels = np.array([labelled(key) for key in keys_of(cache, layer, row, head)[:, channels]])
    turned, half = frame(layer, head, np.arange(len(labels)) // 128)
    logits = (q * half)[:, channels] @ labels.T + q @ turned.T
    weights = np.array([softmax(list(one / H**0.5)) for one in logits])
    if granularity == "page":
        weights = np.array(
            [[one[at : at + PAGE].sum() for at in range(0, len(labels), PAGE)] for one in weights]
        )
    count = budget if granularity == "token" else max(budget // PAGE, 1)
    return heaviest(weights.max(axis=0), count)


@pytest.mark.parametrize("granularity", slow_except(["token", "page"], "token"))
@pytest.mark.parametrize("budget", slow_except((7, 100), 7))
def test_selection_matches_the_slow_ranking(budget, granularity):
    policy = double_sparsity(budget=budget, channels=6, granularity=granularity)
    cache, state = primed(policy)
    q = 2 * np.random.default_rng(3).normal(size=(len(PROMPTS), K * GROUP, H)).astype(np.float32)
    for layer in range(LAYERS):
        select = jax.jit(policy.select, static_argnums=1)
        chosen, summary, _ = select(state, layer, jnp.asarray(q), seen(cache))
        assert (summary, chosen.granularity) == (None, granularity)
        for row, head in np.ndindex(len(PROMPTS), K):
            listed = chosen.ids[row, head, : int(chosen.count[row, head])].tolist()
            channels = state[layer].channels[row, head].tolist()
            group = q[row, head * GROUP : (head + 1) * GROUP]
            assert listed == best(cache, layer, row, head, channels, group, budget, granularity)


def random_layer(rows, pages, lengths, *, scrambled=False):
    """A layer whose every slot, held or not, has keys of varied magnitudes; the keys of a row
    depend only on the row.
    """
    k = np.stack(
        [np.exp(3 * np.random.default_rng(row).normal(size=(K, 40, PAGE, H))) for row in rows]
    )
    k = k[:, :, :pages].reshape(-1, PAGE, H).astype(np.float32)
    at = (
        np.random.default_rng(0).permutation(len(k)).astype(np.int32)
        if scrambled
        else np.arange(len(k))
    )
    pool = np.empty_like(k)
    pool[at] = k
    table = jnp.asarray(at.reshape(len(rows), K, pages), jnp.int32) if scrambled else None
    held = jnp.asarray(np.broadcast_to(np.array(lengths)[:, None], (len(rows), K)), jnp.int32)
    return LayerCache(jnp.asarray(pool), jnp.asarray(pool), held, block_table=table)


@pytest.mark.parametrize("length", slow_except([15, 16, 257], 257))
def test_magnitudes_have_the_same_bits_in_any_batch_and_capacity(length):
    params = tiny_params(LAYERS)  # not within jit: its tracers would be cached for all tests

    def framed_magnitudes(held):
        sizes = spec_of(params, len(held.lengths))
        cache = kv_cache.KVCache((held,), held.lengths[:, 0], held.lengths[:, 0] < 0)
        return key_magnitudes(held, frame_at(StepView(cache, no_constants(sizes)), 0))

    magnitudes = jax.jit(framed_magnitudes)
    alone = magnitudes(random_layer([7], 34, [length]))
    exact = (
        np.abs(np.asarray(random_layer([7], 34, [length]).k, np.float64))
        .reshape(K, -1, H)[:, :length]
        .sum(1)
    )
    np.testing.assert_allclose(alone[0], exact, rtol=1e-6)
    for rows, pages, scrambled in (([7, 1, 2], 34, True), ([3, 7], 40, False), ([7], 40, True)):
        lengths = [length if row == 7 else 33 * row for row in rows]
        among = magnitudes(random_layer(rows, pages, lengths, scrambled=scrambled))
        np.testing.assert_array_equal(among[rows.index(7)], alone[0])


@pytest.mark.slow
def test_many_tokens_are_appended_at_once():
    policy = double_sparsity(channels=4)
    cache, state = primed(policy)
    k = np.random.default_rng(0).normal(size=(2, 5, K, H)).astype(np.float32)
    positions = np.asarray(cache.positions)[:, None] + np.arange(5, dtype=np.int32)

    @jax.jit
    def appended(cache, state, k, positions):
        for layer in range(LAYERS):
            cache = kv_cache.append(cache, layer, k, k, positions, jnp.full(2, 5, jnp.int32))
            view = seen(cache)
            state = policy.append(state, layer, k, k, positions, positions, view)
        return cache, state

    cache, state = appended(cache, state, k, positions)
    assert cache.layers[0].lengths[:, 0].tolist() == [42, 14]
    assert_labels_are_of_the_cache(cache, state)


def test_more_channels_than_the_head_has_are_refused():
    with pytest.raises(
        ValueError, match="channels=18: must be at most 16, the model's head dimension"
    ):
        jsparse.generate(
            tiny_params(LAYERS), PROMPTS[0], max_new_tokens=1, policy="double_sparsity(channels=18)"
        )


def slow_weights(row):
    """Sums |q·k| in the frame of every token with itself over the queries of each group.

    The sums are float64[L, K, H].
    """
    weights = np.zeros((LAYERS, K, H))
    for layer, head in np.ndindex(LAYERS, K):
        keys = np.array(row.k[layer][head], np.float64)
        turned, _ = frame(layer, head, np.arange(len(keys)) // 128)
        for q, k in zip(row.q[layer], keys - turned, strict=True):
            for n in range(head * GROUP, (head + 1) * GROUP):
                weights[layer, head] += np.abs(q[n] * k)
    return weights


def test_calibration_ranks_by_the_products_of_queries_and_keys(monkeypatch):
    params = tiny_params(LAYERS)
    monkeypatch.setattr(chunk_attention, "chunk_tokens", lambda *_: 16)
    model = SlowModel(params)
    weights = [slow_weights(SlowRow(model, prompt)) for prompt in PROMPTS]
    one = jsparse.calibrate_channels(params, PROMPTS[0])
    assert (one.dtype, one.shape) == (np.int32, (LAYERS, K, H))
    np.testing.assert_array_equal(one, np.argsort(-weights[0], axis=-1))
    both = jsparse.calibrate_channels(params, PROMPTS)
    np.testing.assert_array_equal(both, np.argsort(-(weights[0] + weights[1]), axis=-1))
    assert not np.array_equal(one, both)


def test_wrong_arguments_are_refused():
    for arguments, message in (
        ({"budget": 0}, "budget=0: must be an integer of at least 1"),
        ({"channels": 0}, "channels=0: must be an integer of at least 2"),
        ({"channels": 5}, "channels=5: must be even"),
        ({"calibration": 4}, "calibration=4: must be the path of a file"),
        ({"calibration": "no/such"}, "calibration='no/such': must be a safetensors file"),
        ({"granularity": "bits"}, r"granularity='bits': must be one of \['token', 'page'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            double_sparsity(**arguments)


def test_wrong_calibrations_are_refused(ranking, tmp_path):
    path = tmp_path / "wrong"
    twice = np.where(ranking == 3, 4, ranking).astype(np.int32)
    for tensors in (
        {"weight": ranking},
        {"ranking": ranking.astype(np.float32)},
        {"ranking": ranking[0]},
        {"ranking": twice},
        {"ranking": np.ascontiguousarray(ranking[..., :9])},
    ):
        save_file(tensors, path)
        with pytest.raises(ValueError, match=f"calibration='{path}': must hold 'ranking'"):
            double_sparsity(calibration=str(path))
    path.write_text("channels: 1, 2, 3")
    with pytest.raises(ValueError, match=f"calibration='{path}': must be a safetensors file"):
        double_sparsity(calibration=str(path))
    spec = spec_of(tiny_params(LAYERS), 1)
    for shape in ((1, K, H), (LAYERS, 4, H), (LAYERS, K, 8)):
        path = tmp_path / str(shape)
        channel_ranking.save(np.tile(np.arange(shape[-1], dtype=np.int32), (*shape[:2], 1)), path)
        sizes = "{} layers of {} KV heads of {} channels".format(*shape)
        with pytest.raises(ValueError, match=f"is for {sizes}, must be for the model's 2 × 2 × 16"):
            double_sparsity(calibration=str(path)).init(spec)


def test_default_is_a_quarter_of_the_channels_in_whole_eights():
    spec = spec_of(tiny_params(LAYERS), 1)
    for head_dim, channels in ((8, 8), (16, 8), (40, 16), (64, 16), (96, 24), (256, 64)):
        sizes = spec._replace(head_dim=head_dim)
        (labels, *_) = jax.eval_shape(partial(double_sparsity().init, sizes))
        assert labels.channels.shape == (1, K, channels), head_dim
        assert labels.keys.packed.shape[-1] == channels // 2


def command(*args):
    return CliRunner().invoke(app, ["calibrate-channels", "--model", MODEL, *args])


def test_errors_of_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("a " * 700)
    for args, message in (
        ([], "--text"),
        (["--text", "nope"], "error: --text 'nope' cannot be read: No such file"),
        (["--text", "text", "--tokens", "600"], "must be at most 512, the model's maximum"),
        (["--text", "text", "--tokens", "9", "--out", "no/such"], "in an existing folder"),
    ):
        ran = command(*args)
        assert (ran.exit_code, ran.stdout) == (2, "")
        assert message in ran.stderr


@pytest.mark.slow
def test_command_writes_a_file_that_the_policy_reads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("the cat sat on the mat " * 9)
    ran = command("--text", "text", "--tokens", "20", "--out", "it's")
    assert (ran.exit_code, ran.stdout) == (0, 'double_sparsity(calibration="it\'s")\n')
    params = jsparse.load(MODEL)
    ids = prompts.encode(params, Path("text").read_text())[0][0]
    wanted = jsparse.calibrate_channels(params, ids[:20])
    np.testing.assert_array_equal(channel_ranking.load("it's"), wanted)
