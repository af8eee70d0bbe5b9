"""KVzip's scores, against a slow model that reproduces its prompt one token at a time."""

import copy

import jax.numpy as jnp
import numpy as np

from jsparse.policies.expressions import as_policy
from jsparse.policies.kvzip import QUERIES, greatest_weights
from jsparse.runtime.session import Session
from tests.support.slow_model import SlowModel, SlowRow, logits_of, softmax
from tests.support.tiny import random_prompts, spec_of, tiny_params

CHUNK = 6


def test_scores_are_the_greatest_weights_of_the_repeated_prompt():
    params, prompts = tiny_params(), random_prompts((15, 9))
    policy = as_policy(f"kvzip(budget=9, sink=1, recent=2, chunk={CHUNK})")
    session = Session(params, policy, spec_of(params, len(prompts), num_pages=3))
    session.prefill(prompts)
    slow = SlowModel(params)
    for row, prompt in enumerate(prompts):
        expected = reproduced(slow, prompt)
        for layer, entry in enumerate(session.prefilled.state):
            found = np.asarray(entry.tracked)[row, :, : len(prompt)]
            np.testing.assert_allclose(found, expected[layer], rtol=2e-3, atol=1e-6)


def reproduced(slow: SlowModel, prompt: list[int]) -> np.ndarray:
    """[layer, KV head, token]: Kim et al., section 3: the maximum over queries and grouped heads.

    Section 3.4: the softmax of a repeated chunk's query is over the chunk in the prompt and the
    repeated tokens so far.
    """
    whole, c = SlowRow(slow, prompt), slow.config
    scores = np.zeros((c.num_layers, c.num_kv_heads, len(prompt)))
    for start in range(0, len(prompt), CHUNK):
        row, chunk = copy.deepcopy(whole), prompt[start : start + CHUNK]
        end = start + len(chunk)
        for nth, token in enumerate(chunk):
            row.push(token, row.dense)
            for layer in range(c.num_layers):
                for head in range(c.num_heads):
                    keys = row.k[layer][head // row.group]
                    seen = [*keys[start:end], *keys[len(prompt) : len(prompt) + nth + 1]]
                    weights = softmax(logits_of(row.q[layer][-1][head], seen))[: len(chunk)]
                    best = scores[layer, head // row.group, start:end]
                    np.maximum(best, weights, out=best)
    return scores


def test_blocks_of_queries_do_not_change_the_weights():
    """More queries than a block has, of which the last ones are padding."""
    rng, tokens, valid = np.random.default_rng(1), QUERIES + 40, QUERIES + 3
    q = rng.normal(size=(1, tokens, 2, 8))
    first, again = rng.normal(size=(2, tokens, 8))
    weights = np.zeros(tokens)
    for nth in range(valid):
        for head in range(2):
            keys = np.concatenate([first[:valid], again[: nth + 1]])
            weights[:valid] = np.maximum(
                weights[:valid], softmax(logits_of(q[0, nth, head], keys))[:valid]
            )
    found = greatest_weights(
        jnp.asarray(q, jnp.float32),
        jnp.asarray(first[None, None], jnp.float32),
        jnp.asarray(again[None, :, None], jnp.float32),
        jnp.array([valid]),
    )
    np.testing.assert_allclose(found[0, 0], weights, rtol=1e-4, atol=1e-7)
