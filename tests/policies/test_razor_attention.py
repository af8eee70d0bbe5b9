"""RazorAttention against the paper's equations, on a slow model."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsparse
from jsparse.selection import window
from jsparse.selection.attended import token_mask
from tests.support.marks import slow_except
from tests.support.slow_model import SlowModel, SlowRow, attend
from tests.support.tiny import (
    assert_close,
    engine_logits,
    random_prompts,
    random_tokens,
    tiny_params,
)

GATES = ((0, 1), (1, 0), (0, 0))
SINK, RECENT, SHARE, STEPS = 2, 5, 0.25, 7


def razor(row, prompt):
    """Algorithm 1 and equations 4 and 5: a rule for the steps after a prompt of that length."""
    end = prompt - max(RECENT, math.ceil(SHARE * prompt))
    dropped = range(SINK, max(end, SINK))

    def rule(layer, q):
        out = []
        for n in range(len(q)):
            head = n // row.group
            k, v = np.array(row.k[layer][head]), np.array(row.v[layer][head])
            bias = np.zeros(len(k))
            if dropped and not GATES[layer][head]:
                kept = [slot for slot in range(len(k)) if slot not in dropped]
                k = np.vstack([k[kept], k[dropped].mean(axis=0)])
                v = np.vstack([v[kept], v[dropped].mean(axis=0)])
                bias = np.append(np.zeros(len(kept)), math.log(len(dropped)))
            out.append(attend(q[n], k, v, bias))
        return out

    return rule


@pytest.mark.parametrize("page_size", slow_except((8, 64), 8))
def test_decoding_matches_the_slow_model(page_size):
    """Windows of a quarter of the prompt and of 5 tokens, and prompts without dropped tokens."""
    prompts, forced = random_prompts((37, 18, 7, 1)), random_tokens(4, STEPS)
    model, expected = SlowModel(tiny_params()), []
    for prompt, tokens in zip(prompts, forced, strict=True):
        row = SlowRow(model, prompt)
        rule = razor(row, len(prompt))
        expected.append([row.logits, *(row.push(int(token), rule) for token in tokens[:-1])])
    expected = np.swapaxes(np.asarray(expected), 0, 1)
    policy = jsparse.razor_attention(GATES, sink=SINK, recent=RECENT, share=SHARE)
    found = engine_logits(tiny_params(), policy, prompts, forced, page_size=page_size)
    assert_close(found, expected, rtol=1e-4)
    dense = engine_logits(tiny_params(), "dense", prompts, forced, page_size=page_size)
    assert np.abs(dense - expected).max() > 0.01 * np.abs(expected).max()


@pytest.mark.slow
def test_gates_of_all_heads_are_dense_attention():
    prompts, forced = random_prompts((37, 18)), random_tokens(2, STEPS)
    policy = jsparse.razor_attention(np.ones((3, 2)), sink=1, recent=1, share=0.0)
    found, dense = (
        engine_logits(tiny_params(), each, prompts, forced, page_size=8)
        for each in (policy, "dense")
    )
    assert_close(found, dense, rtol=1e-6)


@pytest.mark.parametrize("granularity", ["page", "token"])
def test_window_may_differ_by_head(granularity):
    held, newest_of, size = [20, 20, 3, 17], [0, 9, 30, 1], {"num_pages": 3, "page_size": 8}
    lengths, recent = jnp.array([held]), jnp.array([newest_of])
    selected = jax.jit(partial(window, sink=2, **size, granularity=granularity))
    chosen = selected(lengths, recent=recent)
    marked = np.asarray(token_mask(chosen, lengths, **size))
    for head, (length, newest) in enumerate(zip(held, newest_of, strict=True)):
        wanted = {*range(min(2, length)), *range(max(length - newest, 0), length), length - 1}
        assert {*np.flatnonzero(marked[0, head]).tolist()} == wanted, head


def test_wrong_arguments_are_refused():
    for arguments, message in (
        ({"sink": -1}, "sink=-1: must be an integer of at least 0"),
        ({"recent": 0}, "recent=0: must be an integer of at least 1"),
        ({"share": 1.5}, "share=1.5: must be a number from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            jsparse.razor_attention(GATES, **arguments)
