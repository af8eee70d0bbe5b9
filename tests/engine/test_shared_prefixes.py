"""Tests which rows attend to a shared prefix together."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.lib.llama_8b import LLAMA_8B
from bench.lib.shapes import SMOLLM2
from jsparse.cache import CacheSpec
from jsparse.engine import shared_prefixes, sizing
from jsparse.engine.blocks import CacheBlock
from jsparse.engine.options import EngineOptions
from jsparse.engine.shared_prefixes import shared_prefixes as prefixes_of
from jsparse.engine.step_plan import SharedPrefix
from jsparse.policies.expressions import parse
from jsparse.runtime.program_set import ProgramKey
from tests.support.planning import seq
from tests.support.serving import assert_at_rest, greedy, tiny_llm
from tests.support.tiny import random_prompts, tiny_params

BLOCK = 512


def rows_of(*paths):
    """Sequences in slots from 10 on whose blocks have these names; equal prefixes are shared."""
    blocks, made = {}, []
    for nth, path in enumerate(paths):
        row = seq(nth, [0] * (BLOCK * len(path) + 3), 5)
        for end in range(1, len(path) + 1):
            block = CacheBlock(path[:end].encode(), (len(blocks),))
            row.blocks.append(blocks.setdefault(path[:end], block))
            row.blocks[-1].references += 1
        row.slot = 10 + nth
        made.append(row)
    return made


def found(*paths, count=16, max_rows=16):
    made = prefixes_of(rows_of(*paths), count, max_rows, BLOCK)
    return {frozenset(each.slots): each.tokens // BLOCK for each in made}


@pytest.fixture(autouse=True, scope="module")
def _any_savings():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_prefixes, "MIN_TOKENS", 0)
        patch.setattr(shared_prefixes, "MIN_SHARE", 0)
        yield


def test_rows_group_by_the_prefix_that_saves_most():
    assert found("aaaa", "bb", "aaaa", "aaaab", "", "c") == {frozenset({10, 12, 13}): 4}
    # six blocks common to all save more than one of each document
    assert found(*("ssssss" + name for name in "aabbc")) == {frozenset(range(10, 15)): 6}
    # seven blocks of a document save more than one common to all
    documents = ["s" + 7 * name for name in "abab"]
    assert found(*documents, "s", "s") == {
        frozenset({10, 12}): 8,
        frozenset({11, 13}): 8,
        frozenset({14, 15}): 1,
    }


def test_prefixes_have_at_most_the_maximum_of_rows_and_the_best_come_first():
    paths = [*["aa"] * 5, *["bbb"] * 2, *["c"] * 2]
    made = found(*paths, max_rows=4, count=2)
    assert sorted((len(rows), tokens) for rows, tokens in made.items()) == [(2, 3), (4, 2)]


def test_small_savings_are_ignored(monkeypatch):
    monkeypatch.setattr(shared_prefixes, "MIN_TOKENS", 2 * BLOCK)
    assert not found("a", "a")
    assert found("aa", "aa")
    monkeypatch.setattr(shared_prefixes, "MIN_SHARE", 1 / 4)
    assert not found("aa", "aa", "b" * 8)


def saved(parts):
    """The blocks that need not be read again if the rows of each part read theirs together."""
    return sum((len(part) - 1) * len(prefix(part)) for part in parts)


def prefix(paths):
    columns = itertools.takewhile(lambda letters: len({*letters}) == 1, zip(*paths, strict=False))
    return "".join(letters[0] for letters in columns)


def partitions(items):
    """All partitions of a list."""
    if not items:
        yield []
        return
    first, *rest = items
    for parts in partitions(rest):
        yield [[first], *parts]
        for nth, part in enumerate(parts):
            yield [*parts[:nth], [first, *part], *parts[nth + 1 :]]


@given(st.lists(st.text("ab", max_size=4), min_size=2, max_size=6))
def test_no_other_grouping_saves_much_more(paths):
    """Savings are optimal except for a few trees (one in 1,000 random ones)."""
    made = prefixes_of(rows_of(*paths), 6, 6, BLOCK)
    assert len({slot for each in made for slot in each.slots}) == sum(len(x.slots) for x in made)
    for each in made:
        assert isinstance(each, SharedPrefix)
        assert each.tokens == BLOCK * len(prefix([paths[slot - 10] for slot in each.slots]))
    best = max(saved(parts) for parts in partitions(paths))
    assert sum((len(x.slots) - 1) * x.tokens for x in made) >= 0.8 * BLOCK * best


def test_rows_with_a_common_prefix_match_rows_alone(monkeypatch):
    """Rows join and leave, and one has no common prefix."""
    options = {"steps_per_program": 3, "decode_rows": [3, 4], "ladder": ((0, 16),)}
    (beginning, *ends), lengths = random_prompts((32, 9, 3, 16, 5, 60), seed=3), (14, 2, 6, 13, 12)
    prompts = [[*beginning, *end] for end in ends[:4]] + ends[4:]
    params = tiny_params(num_layers=1)
    llm = tiny_llm(cascade_attention=True, params=params, kv_cache_tokens=512, **options)
    scheduler = llm.engine.scheduler
    planned, plan = [], scheduler._decode
    monkeypatch.setattr(scheduler, "_decode", lambda: planned.append(plan()) or planned[-1])

    def made():
        planned.clear()
        outs = llm.generate(prompts, [greedy(length) for length in lengths])
        return outs, {len(x.slots) for each in planned if each for x in each.prefixes}

    outs, together = made()
    scheduler.sizes = scheduler.sizes._replace(prefix_rows=0)
    plain, apart = made()
    assert {2, 3} <= together
    assert not apart
    for out, want in zip(outs, plain, strict=True):
        (seq,), (expected,) = out.outputs, want.outputs
        assert seq.token_ids == expected.token_ids
        assert seq.token_logprobs == pytest.approx(expected.token_logprobs, abs=1e-5)
        assert seq.read_fraction == expected.read_fraction
    assert_at_rest(llm)


def test_missing_program_is_skipped(monkeypatch):
    """It is compiled meanwhile, for the sampling choices that have been prepared."""
    programs = tiny_llm(cascade_attention=True, steps_per_program=2).engine.programs
    expected, there = [], set()
    monkeypatch.setattr(programs, "expect", expected.extend)
    monkeypatch.setattr(programs, "ready", there.__contains__)
    assert programs.can_run(4, "top")
    programs._prepared = ("sampled",)
    assert not programs.can_run(4, "top")
    assert not expected
    assert not programs.can_run(4, "greedy")
    assert expected == [ProgramKey.of("decode", 4, 1, 4, choice="sampled")]
    there.update(expected)
    assert programs.can_run(4, "greedy")
    programs._prepared = ("sampled", "top")
    assert not programs.can_run(4, "greedy")


def test_rows_share_prefixes_if_half_of_the_layers_are_dense(monkeypatch):
    spec = CacheSpec(8, 64, 32, 8, head_dim=128, page_size=16, num_pages=9, dtype="bfloat16")
    for asked, policy, on_gpu, rows in (
        (None, "dense", True, 16),
        (None, "dense", False, 0),
        (None, "dense_layers(quest(budget=16), n=3)", True, 0),
        (None, "dense_layers(quest(budget=16), n=4)", True, 16),
        (True, "quest(budget=16)", False, 16),
        (False, "dense", True, 0),
    ):
        monkeypatch.setattr(sizing, "on_gpu", lambda here=on_gpu: here)
        assert sizing.prefix_rows(asked, parse(policy), spec) == rows, (asked, policy, on_gpu)
        assert sizing.prefix_rows(asked, parse(policy), spec._replace(num_heads=512)) == 0


def test_small_models_are_prefilled_in_larger_chunks(monkeypatch):
    monkeypatch.setattr(sizing.chunk_attention, "has_flash", lambda *_: True)

    def sizes(config, stall):
        params = tiny_params(num_layers=2)
        rows = EngineOptions(max_num_seqs=2, max_model_len=512)
        spec = sizing.cache_spec(params, rows)._replace(num_pages=2048)
        options = EngineOptions(kv_cache_tokens=65536, max_stall_ms=stall)
        made = sizing.sizes_of(parse("dense"), config, spec, options, steps=1)
        return made.ladder, made.packed_tokens

    assert sizes(SMOLLM2, None) == sizes(SMOLLM2, 200) == (((0, 2048), (8192, 8192)), 2048)
    assert sizes(LLAMA_8B, None) == (((0, 512), (4096, 2048), (8192, 8192)), 512)
    assert sizes(LLAMA_8B, 200) == (((0, 512), (4096, 2048)), 512)
