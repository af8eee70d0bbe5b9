"""Tests the sizes of expressions that leave theirs open."""

import pytest

import jsparse
from jsparse.policies.own_code import resolve
from jsparse.policies.sizes import besides_dense, has_open_size, sized

OWN = """
from jsparse.extend import builder
import jsparse

@builder
def mine(budget: int = 7, base: jsparse.Policy = jsparse.dense()) -> jsparse.Policy:
    return jsparse.streaming(sink=0, recent=budget)
"""


def test_open_size_is_set():
    for text, policy in (
        ("quest", jsparse.quest(200)),
        ("quest(slack=1, group='max')", jsparse.quest(200, slack=1, group="max")),
        ("streaming", jsparse.streaming(sink=4, recent=196)),
        ("streaming(2)", jsparse.streaming(sink=2, recent=198)),
        ("streaming(sink=300)", jsparse.streaming(sink=300, recent=1)),
        ("lychee_decode('smollm2')", jsparse.lychee_decode("smollm2", value=200)),
        ("tidal(recent=3)", jsparse.tidal(200, recent=3)),
        ("lfps(exact=True)", jsparse.lfps(0.2, exact=True)),
        ("keep(quest, recent=3)", jsparse.keep(jsparse.quest(200), recent=3)),
        ("dense_layers(policy=lfps, n=1)", jsparse.dense_layers(jsparse.lfps(0.2), n=1)),
        ("twilight(quest, p=0.8)", jsparse.twilight(jsparse.quest(200), p=0.8)),
        ("seer_attention(threshold=None)", jsparse.seer_attention(budget=200)),
    ):
        assert has_open_size(text), text
        assert sized(text, 200, 1000) is policy, text
    assert sized("lfps", 200, 100) is jsparse.lfps(1.0)


def test_policies_without_an_open_size():
    given = "quest(200)", "quest(budget=200)", "keep(quest(8))", "streaming(4, 8)"
    for text in (*given, "dense", "auto", "oracle_top_p(p=0.5)", "twilight(all_pages())"):
        assert not has_open_size(text), text
    # a threshold counts instead of a budget, and samples have no size
    for text in ("seer_attention(threshold=0.1)", "magic_pig", "keep(magic_pig(bits=8))"):
        assert not has_open_size(text), text


def test_refused_size_is_an_error():
    with pytest.raises(ValueError, match="budget=20: must be at least"):
        sized("cluster_kv", 20, 1000)
    with pytest.raises(ValueError, match="value=20: must be"):
        sized("lychee_decode('smollm2', rule='top_p')", 20, 1000)


def test_user_code_has_a_size(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sized.py").write_text(OWN)
    for text in ("sized.py:mine", "sized.py:mine()"):
        resolve(text)
        assert has_open_size(text)
        assert sized(text, 20, 1000).name == "sized.py:mine(budget=20)"


def test_heads_read_the_tokens_on_average():
    rest = besides_dense(250, 1000, 0.1)
    assert 0.1 * 1000 + 0.9 * rest == pytest.approx(250)
    assert besides_dense(250, 1000, 0) == 250
    assert besides_dense(50, 1000, 0.1) < 0
