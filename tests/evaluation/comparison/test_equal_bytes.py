"""Tests the search for the size that reads the wanted bytes, with made-up measurements."""

import pytest

from jsparse.evaluation.comparison.equal_bytes import Sizing, counted_metric, is_yardstick
from jsparse.policies.expressions import parse
from jsparse.runtime import capacity
from tests.support.tiny import tiny_params

LENGTH, PAGE = 512, 8


def search(form, wanted):
    params = tiny_params()
    spec = capacity.spec_of(params, 1, LENGTH, PAGE)
    return Sizing(params, form, parse(form), wanted, spec, float(LENGTH))


def sizes(found, read, rounds=5):
    """The sizes that are tried when a policy of t tokens reads read(t) tokens."""
    tried = []
    for _ in range(rounds):
        trial = found.propose()
        if trial is None:
            break
        tried.append(trial.tokens)
        found.measured(trial, read(trial.tokens) / LENGTH)
    return tried


def test_first_size_leaves_room_for_selecting_and_dense_heads():
    bounds = LENGTH / PAGE * 2 / 2  # of quest, in tokens: two vectors a page, where a token has two
    for form, wanted, tokens in (
        ("streaming", 0.25, 128),
        ("quest", 0.25, 128 - bounds),
        ("dense_layers(streaming, n=1)", 0.5, 128),  # one of three layers
        ("dense_layers(quest, n=1)", 0.75, 320 - bounds),
        ("dense_layers(streaming, n=1)", 0.25, 1),
        ("dense_layers(streaming, n=3)", 0.25, 1),
        ("oracle_top_k", 0.25, 128),
    ):
        trial = search(form, wanted).propose()
        assert trial is not None
        assert trial.tokens == pytest.approx(tokens), form


def test_size_that_reads_the_bytes_to_within_a_page_is_the_last():
    found = search("streaming", 0.25)
    assert sizes(found, lambda tokens: tokens + PAGE) == [128]
    assert found.note == ""
    assert found.best.policy is parse("streaming(sink=4, recent=124)")


def test_size_is_corrected_by_what_was_read():
    found = search("streaming", 0.25)
    assert sizes(found, lambda tokens: tokens + 40) == [128, 88]
    assert (found.best.tokens, found.note) == (88, "")
    found = search("streaming", 0.25)
    tried = sizes(found, lambda tokens: 100 + tokens // 4)
    assert tried == [128, 124, 112][: len(tried)]
    assert abs(100 + found.best.tokens // 4 - 128) <= PAGE


def test_bytes_out_of_reach_give_the_nearest_size():
    found = search("streaming", 0.25)
    assert sizes(found, lambda tokens: 300) == [128, 1]
    assert found.note == "nearest size"
    found = search("streaming", 0.25)
    assert sizes(found, lambda tokens: 200 + tokens) == [128, 1]
    assert (found.best.tokens, found.note) == (1, "nearest size")


def test_all_bytes_are_all_tokens():
    found = search("quest", 1.0)
    assert sizes(found, lambda tokens: 1.1 * LENGTH) == [LENGTH]
    assert found.note == ""


def test_refused_size_leaves_the_policy_as_it_is():
    found = search("cluster_kv", 0.25)
    trial = found.propose()
    assert trial is not None and trial.policy is parse("cluster_kv")
    found.measured(trial, 0.9)
    assert found.propose() is None
    assert found.note == "budget=128: must be at least 145"


def test_policy_of_any_size_is_measured_once():
    found = search("quest(budget=64)", None)
    assert sizes(found, lambda tokens: 70) == [0]
    assert (found.best.policy, found.note) == (parse("quest(budget=64)"), "")


def test_keys_read_by_oracles_do_not_count():
    for text in ("oracle_top_k(8)", "oracle_top_p()", "keep(oracle_top_k(8))"):
        assert is_yardstick(parse(text)) and counted_metric(parse(text)) == "read", text
    assert counted_metric(parse("quest")) == "bytes_share"
