"""Tests Twilight against a slow model: the base's tokens, their 4-bit logits, the smallest set with
mass p.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import jsparse
from jsparse.cache import LayerCache
from jsparse.policies.break_evens import BREAK_EVENS
from jsparse.policies.expressions import parse
from jsparse.policies.twilight import break_even
from jsparse.selection.attended import token_mask
from tests.support.marks import slow_except
from tests.support.one_layer import OneLayer
from tests.support.tiny import (
    assert_close,
    engine_logits,
    random_prompts,
    random_tokens,
    tiny_params,
)
from tests.support.toy_policies import bypass, shrink

BASES = (
    "all_pages()",
    "quest(budget=24)",
    "streaming(sink=5, recent=19)",
    "oracle_top_k(budget=17)",
)
P = 0.8


def four_bits(k):
    """Keys [..., H] rounded to 16 levels between the smallest and largest channel of each, with
    scale and zero in float16.
    """
    low, high = k.min(-1, keepdims=True), k.max(-1, keepdims=True)
    scale, zero = (x.astype(np.float16).astype(np.float64) for x in ((high - low) / 15, low))
    return np.clip(np.round((k - zero) / scale), 0, 15) * scale + zero


def num_needed(weights, p):
    """The indices of the fewest weights that sum to p of all."""
    order = np.argsort(-weights)
    share = np.cumsum(weights[order]) / weights.sum()
    return set(order[: int(np.searchsorted(share, p)) + 1].tolist())


def attended(layer: OneLayer, chosen):
    """The slots of each row and head."""
    held = layer.kv
    return np.asarray(
        token_mask(chosen, held.lengths, num_pages=held.num_pages, page_size=held.page_size)
    )


def listed(layer: OneLayer, chosen):
    """The slots in the list itself: bool[B, K, S]."""
    marks = np.zeros((*chosen.count.shape, layer.kv.capacity), bool)
    for at in np.ndindex(chosen.count.shape):
        for i in range(int(chosen.count[at])):
            unit = int(chosen.ids[at][i])
            if chosen.granularity == "token":
                marks[at][unit] = True
                continue
            word = 2**layer.page_size - 1 if chosen.bits is None else int(chosen.bits[at][i])
            marks[at][
                [unit * layer.page_size + t for t in range(layer.page_size) if word >> t & 1]
            ] = True
    return marks[..., : layer.length]


def expected(layer: OneLayer, base, prune):
    """Twilight's result, including the newest token's rule: bool[B, K, S]."""
    candidates = listed(layer, base.select())
    logits, size = layer.logits(four_bits(layer.k)), layer.page_size
    left = np.zeros((*candidates.shape[:2], layer.kv.capacity), bool)
    for b, head in np.ndindex(candidates.shape[:2]):
        slots = np.flatnonzero(candidates[b, head])
        for row in logits[b, head]:
            weights = np.exp(row - row[slots].max())
            if prune == "page_mass":
                pages = sorted({slot // size for slot in slots})
                mass = np.array(
                    [weights[[s for s in slots if s // size == page]].sum() for page in pages]
                )
                kept = {pages[i] for i in num_needed(mass, P)}
                left[b, head, [s for s in slots if s // size in kept]] = True
            else:
                left[b, head, slots[list(num_needed(weights[slots], P))]] = True
        left[b, head, layer.length - 1] = True
    return left


@pytest.mark.parametrize("prune", slow_except(["page_mass", "token"], "page_mass"))
@pytest.mark.parametrize("base", slow_except(BASES, BASES[1]))
def test_result_matches_the_slow_model(base, prune):
    left_out = 0
    for seed in range(6):
        layer = OneLayer(jsparse.twilight(parse(base), p=P, prune=prune), seed=seed)
        want = expected(layer, OneLayer(parse(base), seed=seed), prune)
        chosen = layer.select()
        assert chosen.granularity == ("token" if prune == "token" else "page")
        np.testing.assert_array_equal(attended(layer, chosen), want)
        left_out += attended(layer, OneLayer(parse(base), seed=seed).select())[~want].sum()
    assert left_out > 6


def test_heads_dense_in_the_base_stay_dense():
    base = jsparse.all_pages()

    def select(state, layer, q, view):
        chosen, summary, state = base.select(state, layer, q, view)
        dense = jnp.zeros(chosen.count.shape, jnp.bool_).at[:, 0].set(True)
        return replace(chosen, dense=dense), summary, state

    layer = OneLayer(jsparse.twilight(base._replace(select=select), p=0.5))
    mask = attended(layer, layer.select())
    assert mask[:, 0, : layer.length].all()
    assert not mask[:, 1, : layer.length].all()


def test_estimate_includes_the_bias():
    """A slot that counts for exp(30) tokens is kept alone."""
    layer = OneLayer(
        jsparse.twilight(jsparse.all_pages()._replace(needs=("bias",)), p=0.9, prune="token")
    )
    assert layer.kv.bias is not None
    bias = layer.kv.bias.reshape(2, 2, -1).at[:, :, 11].set(30.0).reshape(layer.kv.bias.shape)
    held = layer.kv._replace(bias=bias)
    layer.view = layer.view._replace(cache=layer.view.cache._replace(layers=(held,)))
    assert layer.select().ids[..., 0].tolist() == [[11, 11], [11, 11]]
    assert layer.select().count.tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    "base",
    slow_except((*BASES[1:], "tidal(budget=12, first=0, again=2)", "double_sparsity(budget=12)")),
)
def test_base_works_as_it_does_alone(base):
    """All of its selection is kept, so that its own hooks must leave the same state."""
    prompts, forced = random_prompts((37, 20)), random_tokens(2, 6)
    alone = engine_logits(tiny_params(), base, prompts, forced, page_size=8)
    for prune in ("page_mass", "token"):
        around = engine_logits(
            tiny_params(), f"twilight({base}, p=1.0, prune={prune!r})", prompts, forced, page_size=8
        )
        assert_close(around, alone, rtol=2e-5)


@pytest.mark.slow
def test_all_tokens_are_attended_below_dense_below():
    params, forced = tiny_params(), random_tokens(1, 9)
    prompt = random_prompts((28,))

    def logits(policy):
        return engine_logits(params, policy, prompt, forced, page_size=8)

    sparse = logits("twilight(all_pages(), p=0.5)")
    switching = logits("twilight(all_pages(), p=0.5, dense_below=33)")
    exact = logits("dense")
    # steps 1 … 4 append the 29th … 32nd token
    assert_close(switching[:5], exact[:5], rtol=1e-5)
    assert np.abs(sparse[1:5] - exact[1:5]).max() > 1e-2
    assert np.abs(switching[5:] - exact[5:]).max() > 1e-2


def test_break_even_is_a_number_of_tokens_by_batch_and_shape(monkeypatch):
    nbytes = BREAK_EVENS["NVIDIA H200"].over_quest

    def tokens(batch, kv_heads, head_dim, dtype):
        pool = jnp.zeros((batch * kv_heads, 16, head_dim), dtype)
        return break_even(LayerCache(pool, pool, jnp.zeros((batch, kv_heads), jnp.int32)))

    assert 57_000 <= tokens(1, 8, 128, jnp.bfloat16) <= 61_000  # the measured value
    assert tokens(8, 8, 128, jnp.bfloat16) == tokens(1, 8, 128, jnp.bfloat16) // 8
    assert tokens(1, 2, 64, jnp.float32) == nbytes // (2 * 2 * 64 * 4)


def test_wrong_hyper_parameters_are_refused():
    pages = jsparse.all_pages()
    below = "must be 'auto' or an integer of at least 0"
    for arguments, message in (
        ({"base": "quest"}, "base='quest': must be a policy"),
        ({"base": pages, "p": 0}, "p=0: must be a number above 0 and at most 1"),
        ({"base": pages, "prune": "tokens"}, "prune='tokens': must be one of"),
        ({"base": pages, "dense_below": -1}, f"dense_below=-1: {below}"),
        ({"base": pages, "dense_below": "always"}, f"dense_below='always': {below}"),
        ({"base": shrink()}, r"base=shrink\(.*must keep every token"),
    ):
        with pytest.raises(ValueError, match=message):
            jsparse.twilight(**arguments)


@pytest.mark.slow
def test_base_with_a_summary_is_refused():
    params = tiny_params(num_layers=1)
    with pytest.raises(ValueError, match="must not summarise"):
        engine_logits(params, jsparse.twilight(bypass()), random_prompts((9,)), random_tokens(1, 2))
