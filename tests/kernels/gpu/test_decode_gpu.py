"""Tests whole decode steps on a GPU: kernels and references give a model the same logits."""

import logging
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.models.checkpoint import Params
from jsparse.models.config import ModelConfig
from jsparse.models.transformer import weight_shapes
from jsparse.pallas_kernels import dispatch
from jsparse.policy import Policy
from tests.support.tiny import VOCAB, assert_close, engine_logits, random_prompts, random_tokens

pytestmark = pytest.mark.gpu
LENGTHS, STEPS = (37, 150, 301), 6
# The page size and the backend that each policy must use. A page of 64 tokens has no bits, so
# streaming lists tokens. Budgets and masses are chosen so that no page is close to the threshold:
# one page more or less is a visible difference, one token of 192 is not.
RUNS: dict[str | Policy, tuple[int, str]] = {
    "dense()": (16, "block_sparse_decode: mosaic"),
    "streaming(sink=4, recent=60)": (16, "block_sparse_decode: mosaic"),
    "streaming(sink=5, recent=61)": (64, "token_sparse_decode: triton"),
    "oracle_top_p(p=0.9)": (16, "threshold_select: triton"),
    "oracle_top_k(budget=64, granularity='page')": (16, "threshold_select: triton"),
    "quest(budget=64)": (16, "bounds_append: triton"),
    "quest(budget=48, bounds_dtype='uint8')": (16, "page_bounds: triton"),
    "arkvale(budget=64)": (16, "page_bounds: triton"),
    "arkvale(budget=64, volume='ball')": (16, "centroid_scores: triton"),
    "double_sparsity(budget=64)": (16, "int4_scores: triton"),
    "tidal(budget=64, first=0, again=5, recent=16)": (16, "place_logits: triton"),
    "lychee_decode([[1, 1], [0, 1], [0, 0]], value=64, recent=16)": (16, "place_logits: triton"),
    "lychee_decode([[1, 1], [0, 1], [0, 0]], value=192, granularity='token')": (
        16,
        "token_sparse_decode: triton",
    ),
    "lychee_decode([[1, 1], [0, 1], [0, 0]], rule='top_p', value=0.53)": (
        16,
        "threshold_select: triton",
    ),
    "duo_attention([[1, 0], [0, 1], [0, 0]], sink=4, recent=60)": (
        16,
        "block_sparse_decode: mosaic",
    ),
    "twilight(all_pages(), p=0.9)": (16, "int4_append: triton"),
    "twilight(quest(budget=128), p=0.7)": (16, "block_sparse_decode: mosaic"),
    "twilight(quest(budget=128), p=0.9, prune='token')": (16, "token_sparse_decode: triton"),
}


@cache
def model(heads: int = 6, kv_heads: int = 2) -> Params:
    """A model of three layers in bfloat16, with a head dimension that the kernels support."""
    config = ModelConfig(
        family="llama",
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=192,
        num_layers=3,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=64,
        max_position_embeddings=1024,
    )
    rng = np.random.default_rng(0)

    def draw(leaf):
        return jnp.asarray(
            np.full(leaf.shape, 1.0) if leaf.ndim == 1 else rng.normal(size=leaf.shape) * 0.1,
            leaf.dtype,
        )

    return Params(
        jax.tree.map(draw, weight_shapes(config, jnp.bfloat16)), config, None, {}, "model"
    )


@pytest.mark.parametrize("policy", [x for x in RUNS if x.startswith(("str", "quest", "tidal"))])
def test_logits_of_k_and_v_in_8_bits_match_those_of_the_references(policy, caplog, monkeypatch):
    rounded = replace(model(), kv_cache_dtype="int8")
    assert_as_by_the_references(rounded, policy, "decode: triton", caplog, monkeypatch)


@pytest.mark.parametrize("policy", RUNS, ids=str)
def test_logits_match_those_of_the_references(policy, caplog, monkeypatch):
    assert_as_by_the_references(model(), policy, RUNS[policy][1], caplog, monkeypatch)


def assert_as_by_the_references(params, policy, ran, caplog, monkeypatch):
    page_size, _ = RUNS[policy]
    prompts, forced = random_prompts(LENGTHS), random_tokens(len(LENGTHS), STEPS)

    def logits():
        jax.clear_caches()
        return engine_logits(params, policy, prompts, forced, page_size=page_size)

    with caplog.at_level(logging.DEBUG, logger="jsparse.kernels"):
        ours = logits()
    assert ran in caplog.text
    caplog.clear()
    monkeypatch.setattr(dispatch, "compute_capability", lambda: None)
    with caplog.at_level(logging.DEBUG, logger="jsparse.kernels"):
        theirs = logits()
    assert "mosaic" not in caplog.text.replace("not mosaic", "") and ": triton" not in caplog.text
    assert_close(ours, theirs, rtol=2e-2)
