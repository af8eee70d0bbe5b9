"""Tests bench.twilight_speed and its trace: replayed counts, and parts by kernel order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import random_prompts, tiny_params

import jsparse
from bench.lib.environment import REPOSITORY
from bench.lib.replay import pages_kept, parse, spread_evenly
from bench.twilight_speed import main, parts
from bench.twilight_trace import counting
from jsparse import cache as kv_cache
from jsparse.evaluation.teacher_forcing import force


@pytest.mark.parametrize("shape", [(1, 8), (64, 8)])
def test_dealt_counts_have_the_traces_mean(shape):
    recorded = pages_kept(131072)
    dealt = spread_evenly(recorded, 0, shape)
    assert dealt.shape == shape
    assert set(dealt.flat) <= set(recorded)
    assert dealt.mean() == pytest.approx(recorded.mean(), rel=0.1)
    assert (dealt != spread_evenly(recorded, 1, shape)).any()


def test_the_trace_of_the_longest_context_that_fits_is_replayed():
    assert pages_kept(2048).max() <= 2048 / 16 < pages_kept(131072).max()
    np.testing.assert_array_equal(pages_kept(1), pages_kept(1024))


def test_replayed_policies_keep_no_more_than_they_did():
    spec = kv_cache.CacheSpec(1, 2, 4, 2, 16, 16, 64, jnp.float32)
    cache = jax.jit(kv_cache.init, static_argnums=0)(spec)
    cache = cache._replace(
        layers=(cache.layers[0]._replace(lengths=np.full((2, 2), 1000, np.int32)),)
    )
    plain, replayed = (parse(text, 1024) for text in ("all_pages()", "replayed(all_pages())"))

    @jax.jit
    def both(q, cache):
        return [
            policy.select(policy.init(spec), 0, q, kv_cache.StepView(cache))[0]
            for policy in (plain, replayed)
        ]

    before, after = both(np.ones((2, 4, 16), np.float32), cache)
    fewer = np.asarray(after.count) < np.asarray(before.count)
    assert (fewer | (np.asarray(after.count) == np.asarray(before.count))).all()
    assert fewer.any()
    np.testing.assert_array_equal(after.ids, before.ids)
    assert plain is jsparse.all_pages()
    with pytest.raises(ValueError, match="must be an expression"):
        parse("replayed(all_pages()", 1024)


def test_policies_of_your_own_are_found():
    text = f"{REPOSITORY / 'examples/my_quest.py'}:my_quest(budget=64)"
    own = parse(text, 1024)
    assert own.name == text and own is parse(text, 1024)
    assert parse(f"replayed({text})", 1024).name == f"replayed({text})"


def test_times_are_parted_at_the_estimate_and_at_attention():
    names = (
        "bounds_kernel",
        "select_kernel",
        "scores_kernel",
        "memset",
        "select_kernel",
        "x_mosaic_gpu",
        "_merge",
    )
    order = [{"name": name, "us": float(2**nth)} for nth, name in enumerate(names)]
    assert parts({"order": order}) == {"base": 3.0, "estimate": 4.0, "top_p": 24.0, "attend": 96.0}
    assert parts({"order": order[5:]}) == parts({}) == {}


@pytest.mark.slow
def test_a_tiny_run_has_a_line_for_each_contender(monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv", ["twilight_speed", "--tiny", "--only", "dense", "twilight, 8 bits"]
    )
    main()
    lines = capsys.readouterr().out.splitlines()
    assert [line[14:32].strip() for line in lines] == ["dense", "twilight, 8 bits"]
    assert all(float(line.split()[-1]) > 0 for line in lines)


@pytest.mark.slow
def test_only_steps_that_select_are_recorded():
    """Rows of 21, 22 and 23 tokens fall back; three steps are left."""
    policy = counting(parse("twilight(all_pages(), dense_below=24)", 1024), 6)
    forcing = force(tiny_params(num_layers=1), [policy], random_prompts([20]), max_new_tokens=6)
    steps, counts = forcing.last_state(1).own
    assert steps.tolist() == [3] * len(counts)
    assert (counts[:, :3] > 0).all() and (counts[:, 3:] == -1).all()
