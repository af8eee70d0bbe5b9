"""A tiny random model, and the engine on forced tokens, with the logits of every step."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsparse
from jsparse.cache import CacheSpec, ReadOnly
from jsparse.cache.key_constants import KeyConstants
from jsparse.evaluation.policy_trial import VOCAB, random_model
from jsparse.models.checkpoint import Params
from jsparse.policies.expressions import as_policy
from jsparse.policy import Policy
from jsparse.runtime import capacity, chunk_attention, sampling
from jsparse.runtime.constants import constants
from jsparse.runtime.session import Session


@cache
def tiny_params(
    num_layers: int = 3, num_heads: int = 4, num_kv_heads: int = 2, seed: int = 0
) -> Params:
    """The random model of `jsparse check-policy`, in these sizes."""
    return replace(random_model(num_layers, num_heads, num_kv_heads, seed), name="tiny")


def with_nan(params: Params, token: int) -> Params:
    """The model with NaN for the embedding of one token."""
    weights = params.weights["params"]
    embed = weights["embed"].at[token].set(np.nan)
    return replace(params, weights={"params": weights | {"embed": embed}})


def random_prompts(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    """One prompt of random ids for each length."""
    rng = np.random.default_rng(seed)
    return [rng.integers(VOCAB, size=n).tolist() for n in lengths]


def random_tokens(rows: int, steps: int, seed: int = 2) -> np.ndarray:
    """Ids to force on the engine, int32[rows, steps]."""
    return np.random.default_rng(seed).integers(VOCAB, size=(rows, steps)).astype(np.int32)


def engine_logits(
    params: Params,
    policy: Policy | str,
    prompts: list[list[int]],
    forced: np.ndarray,
    *,
    chunk: int = 512,
    page_size: int = 16,
    max_length: int | None = None,
    steps_per_program: int = 1,
    knobs: dict[str, jax.Array] | None = None,
) -> np.ndarray:
    """Runs a session on forced tokens; float32[steps, B, V].

    Entry i holds the logits after the prompt and the first i forced tokens. Prompts are prefilled
    in chunks of `chunk`.
    """
    steps = forced.shape[1]
    spec = capacity.cache_spec(params, prompts, steps, max_length, page_size)
    session = Session(params, as_policy(policy), spec, steps_per_program=steps_per_program)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_attention, "chunk_tokens", lambda *_: chunk)
        session.prefill(prompts)
    return forced_logits(session, forced, knobs)


def forced_logits(
    session: Session, forced: np.ndarray, knobs: dict[str, jax.Array] | None = None
) -> np.ndarray:
    """Decodes forced tokens after a session's cached ones; float32[steps, B, V]."""
    rows, steps = forced.shape
    # one size for any number of steps: tables of two sizes would be two programs
    table = jnp.asarray(np.pad(forced, ((0, 0), (0, -steps % 32))).T)
    results = session.steps(
        sampling.forced, table, limits=[steps] * rows, knobs=knobs, keep_logits=True
    )
    return np.concatenate([np.asarray(result.logits) for result in results])


def dense_pass(params: Params, text: Sequence[int]) -> np.ndarray:
    """The logits of one dense pass, float32[len(text), V]; texts are padded to share a program."""
    padded = [*text, *[0] * (-len(text) % 64)]
    return np.asarray(jsparse.logits(params, padded)[0])[: len(text)]


def read_only(params: Params, policy: Policy | str) -> ReadOnly:
    """The inputs of programs beside the weights, for tests that call hooks themselves."""
    return ReadOnly(constants(params, as_policy(policy)))


def no_constants(spec: CacheSpec) -> dict[str, jnp.ndarray]:
    """Key constants that leave keys unchanged, for hooks that a test calls itself."""
    shape = (spec.num_layers, spec.num_kv_heads)
    return KeyConstants(
        jnp.zeros((*shape, spec.head_dim)),
        jnp.ones((*shape, spec.head_dim // 2)),
        jnp.zeros(spec.head_dim // 2),
    )._asdict()


def traces(*jitted: Any) -> list[int]:
    """The number of traces of each jitted function so far."""
    return [function._cache_size() for function in jitted]


def spec_of(params: Params, batch: int, *, page_size: int = 8, num_pages: int = 16) -> CacheSpec:
    """The cache's sizes for this model."""
    c = params.config
    return CacheSpec(
        c.num_layers,
        batch,
        c.num_heads,
        c.num_kv_heads,
        c.head_dim,
        page_size,
        num_pages,
        jnp.dtype(params.dtype),
    )


def assert_close(actual, expected, *, rtol: float = 2e-4, **at) -> None:
    """Compares logits by their largest difference over the largest logit; reports its position."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, at
    error = np.abs(actual - expected) / np.abs(expected).max()
    assert np.isfinite(actual).all(), at
    assert error.max() <= rtol, (error.max(), np.unravel_index(error.argmax(), error.shape), at)
