"""Tests that an inspected step is the one that decoding runs, and that its page shows it."""

import base64
import json
import re

import numpy as np
import pytest

import jsparse
from jsparse.evaluation.inspection import Inspection, inspect_step
from jsparse.evaluation.report.inspect_page import page
from tests.support.programs import shared
from tests.support.tiny import random_prompts, tiny_params

(PROMPT,) = random_prompts([30])
WINDOW = "streaming(sink=2, recent=3)"


@shared
def inspected(policy, **options) -> Inspection:
    return inspect_step(tiny_params(num_layers=2), policy, PROMPT, page_size=8, **options)


def test_window_attends_to_both_ends():
    shown = inspected(WINDOW, step=4)
    assert shown.attended.shape == (2, 2, 34)
    assert shown.prompt_tokens == 30
    places = np.flatnonzero(shown.attended.all(axis=(0, 1)))
    np.testing.assert_array_equal(places, [0, 1, 31, 32, 33])
    assert shown.attended_fraction == pytest.approx(5 / 34)
    assert not shown.fell_back


@pytest.mark.slow
def test_step_is_the_one_that_generate_runs():
    options = {"max_new_tokens": 5, "page_size": 8, "temperature": 0}
    made = jsparse.generate(tiny_params(num_layers=2), PROMPT, policy=WINDOW, **options)
    shown = inspected(WINDOW, step=4)
    named = [f"<{token}>" for token in [*PROMPT, *made.token_ids]]
    assert shown.tokens == named[:34]
    assert shown.next_token == named[34]


@shared
def best_tokens():
    """A step of the oracle, of a model with one query head per KV head."""
    params = tiny_params(num_layers=1, num_kv_heads=4)
    return inspect_step(params, "oracle_top_k(budget=5)", PROMPT, page_size=8)


def test_weights_are_those_of_dense_attention():
    best = best_tokens()
    np.testing.assert_allclose(best.weights.sum(axis=2), 1, rtol=1e-5)
    order = np.argsort(-best.weights, axis=2)
    for found, ranked in zip(best.attended.reshape(-1, 31), order.reshape(-1, 31), strict=True):
        # the newest token is always attended to
        assert set(np.flatnonzero(found)) == {*ranked[:5], 30}
    assert best.covered == pytest.approx((best.weights * best.attended).sum() / 4)


def test_overlap_compares_a_head_with_the_one_in_the_layer_below():
    weights = np.array(  # three layers of two heads
        [
            [[0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1]],
            [[0.3, 0.4, 0.1, 0.2], [0.1, 0.2, 0.4, 0.3]],
            [[0.1, 0.4, 0.3, 0.2], [0.1, 0.2, 0.4, 0.3]],
        ],
        np.float32,
    )
    shown = inspected(WINDOW)._replace(tokens=list("abcd"), weights=weights, fell_back=())
    np.testing.assert_array_equal(shown.overlap(2), [[1, 0], [0.5, 1]])
    np.testing.assert_array_equal(shown.overlap(4), np.ones((2, 2)))
    shares = shown._replace(fell_back=(2,)).overlap(1)
    np.testing.assert_array_equal(shares, [[0, 0], [np.nan, np.nan]])
    for count in (0, 5):
        with pytest.raises(ValueError, match=f"overlap={count}: must be"):
            shown.overlap(count)


@pytest.mark.slow
def test_dropped_tokens_have_no_weight():
    shown = inspected("snapkv(budget=12, window=4)", step=2)
    assert not shown.weights[~shown.attended].any()
    np.testing.assert_allclose(shown.weights.sum(axis=2), 1, rtol=1e-5)
    held = shown.attended.sum(axis=2)
    assert (held > 0).all() and (held < 32).all()
    # the newest tokens are at their text positions, not at their slots
    assert shown.attended[:, :, -2:].all()


def test_invalid_arguments_are_refused():
    for prompt, options, said in [
        (PROMPT, {"step": 0}, "step=0: must be an integer of at least 1"),
        ([PROMPT, PROMPT], {}, "prompt: must be one prompt, not 2"),
        (PROMPT, {"step": 500}, "512"),
    ]:
        with pytest.raises(ValueError, match=said):
            inspect_step(tiny_params(num_layers=2), "dense", prompt, page_size=8, **options)


def test_page_contains_the_step_safely_escaped():
    shown = inspected(WINDOW, step=4)._replace(next_token="</script><b>&")
    made = page(shown)
    assert "</script><b>" not in made
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', made, re.S)
    read = json.loads(data)
    assert read["next_token"] == "</script><b>&"
    cells = np.frombuffer(base64.b64decode(read["cells"]), np.uint8).reshape(shown.attended.shape)
    np.testing.assert_array_equal(cells >= 128, shown.attended)
    np.testing.assert_allclose(((cells & 127) / 127) ** 2, shown.weights, atol=0.01)
    # nothing is fetched
    assert not re.search(r"""(src|href)=["']|url\(|@import""", made)
