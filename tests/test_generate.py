"""Tests generate(): stopping, streaming, sampling, defaults, statistics, compilations, refusals."""

import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsparse
from jsparse import SamplingParams
from jsparse.builder import dense
from jsparse.machine import memory
from jsparse.models.gguf import GGUFFile
from jsparse.models.tokenizer import Tokenizer
from jsparse.policy import Services
from jsparse.runtime import (
    capacity,
    generate_options,
    prefill,
    sampling,
    session,
    session_prefill,
    store,
    turn,
)
from jsparse.runtime import rows as driver
from tests.support.marks import slow_except
from tests.support.programs import shared
from tests.support.tiny import random_prompts, tiny_params, traces, with_nan

GGUF = Path(__file__).parent / "fixtures" / "hf" / "llama" / "model.gguf"
TOKENIZERS = Path(__file__).parent / "fixtures" / "tokenizers"
PROMPTS = random_prompts((37, 18, 3))
ALL = tuple(map(tuple, PROMPTS))


@pytest.fixture(scope="module")
def params():
    """Makes a model without a tokenizer."""
    return tiny_params(num_layers=1)


@pytest.fixture(scope="module")
def texts():
    """Makes a model of 128 positions with a tokenizer of bytes and a few merges."""
    return jsparse.load(GGUF, dtype="float32")


def generate(params, prompts, **options):
    """Generates in a cache of one size, so that tests share their programs."""
    return jsparse.generate(params, prompts, **{"max_length": 96} | options)


@shared
def batch(prompts=ALL, **options):
    """The results for all prompts on the model without a tokenizer, made once for all tests."""
    return generate(tiny_params(num_layers=1), [list(ids) for ids in prompts], **options)


def alone(**options):
    """The result for the second prompt alone."""
    return batch(ALL[1:2], **options)[0]


def with_defaults(params, **defaults):
    return dataclasses.replace(params, generation_defaults=defaults)


def forced(params, rows, monkeypatch, prompt=None, **options):
    """Runs generate() with the tokens of `rows` (texts or ids) in place of the model's choice."""
    ids = [
        params.tokenizer.encode(r, add_special_tokens=False) if isinstance(r, str) else list(r)
        for r in rows
    ]
    steps = max(map(len, ids))
    # one size for any number of steps: tables of two sizes would be two programs
    table = np.array([r + [5] * (32 - len(r)) for r in ids], np.int32)

    monkeypatch.setattr(turn, "chooser", lambda *_: (sampling.forced, jnp.asarray(table.T)))
    prompts = [[1, 2, 3]] * len(rows) if prompt is None else prompt
    usual = {} if "sampling" in options else {"max_new_tokens": steps, "eos_token_id": []}
    return generate(params, prompts, **(usual | options))


@pytest.mark.slow
def test_float16_runs_on_a_cpu(params):
    weights = jax.tree.map(lambda x: x.astype(jnp.float16), params.weights)
    half = dataclasses.replace(params, weights=weights)
    ids = PROMPTS[0]
    out = generate(half, ids, max_new_tokens=4, eos_token_id=[], logprobs=True)
    rounded = dataclasses.replace(params, weights=jax.tree.map(jnp.float32, weights))
    logits = jax.nn.log_softmax(
        jsparse.logits(rounded, [ids + out.token_ids])[0, len(ids) - 1 : -1]
    )
    expected = logits[np.arange(4), np.asarray(out.token_ids)]
    np.testing.assert_allclose(out.logprobs, expected, atol=0.02)
    assert jsparse.logits(half, [ids]).dtype == jnp.float32


@pytest.mark.slow
def test_jax_settings_of_the_caller_change_nothing(params):
    run = partial(generate, params, PROMPTS, max_new_tokens=20, eos_token_id=[], page_size=8)
    fixed = "budget=12, sink=1, recent=3, lengths=(1, 3), period=2, chunks='fixed'"
    policy = f"lychee_cluster({fixed})"
    expected = run(policy=policy)
    with (
        jax.enable_x64(True),
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
        jax.transfer_guard("disallow"),
    ):
        made, logits = run(policy=policy), jsparse.logits(params, [PROMPTS[0]])
    assert [out.token_ids for out in made] == [out.token_ids for out in expected]
    assert logits.dtype == jnp.float32


def test_nan_logits_are_an_error(params):
    with pytest.raises(
        FloatingPointError, match=r"prompt\[1\], token 0: the model's logits are NaN"
    ):
        generate(with_nan(params, 7), [[1, 2, 3], [1, 7]], max_new_tokens=4, eos_token_id=[])


@pytest.mark.parametrize("place", slow_except([3, 70], 70))
def test_nan_anywhere_in_a_prompt_is_an_error(params, place):
    """In a chunk before the last, and in the middle of the last."""
    (prompt,) = random_prompts((80,), seed=4)
    prompt = [5 if token == 7 else token for token in prompt]
    prompt[place] = 7
    with pytest.raises(FloatingPointError, match="prompt.0., token 0"):
        generate(with_nan(params, 7), prompt, max_new_tokens=4, eos_token_id=[])


# Shapes of results


def test_list_of_prompts_gives_a_list(params):
    given = PROMPTS[1]
    out = generate(params, given, max_new_tokens=4)
    assert isinstance(out, jsparse.Generation)
    assert len(out.token_ids) == 4
    assert out.logprobs is None
    assert out.text == ""
    for listed in ([given], np.array([given])):
        outs = generate(params, listed, max_new_tokens=4)
        assert [each.token_ids for each in outs] == [out.token_ids]
    again = generate(params, jnp.asarray(np.array(given)), max_new_tokens=4)
    assert again.token_ids == out.token_ids


# End of generation


def test_greedy_ends_by_length(params):
    out = batch(max_new_tokens=12, eos_token_id=())[1]
    assert out.finish_reason == "length"
    assert len(out.token_ids) == 12
    text = [*PROMPTS[1], *out.token_ids]
    logits = dense_logits(params, text)
    assert out.token_ids == logits[len(PROMPTS[1]) - 1 : -1].argmax(-1).tolist()


def test_end_token_stops_its_row_and_is_kept(params):
    free = batch(max_new_tokens=12, eos_token_id=())
    end = free[0].token_ids[4]  # in the middle of row 0
    stopping = with_defaults(params, eos_token_id=[298, end])
    for outs in (
        generate(params, PROMPTS, max_new_tokens=12, eos_token_id=end),
        generate(stopping, PROMPTS, max_new_tokens=12),
    ):
        for out, whole in zip(outs, free, strict=True):
            ids = whole.token_ids
            stop = ids.index(end) + 1 if end in ids else None
            assert out.token_ids == ids[:stop]
            assert out.finish_reason == ("length" if stop is None else "stop")
            assert out.stats.new_tokens == len(out.token_ids)
        assert outs[0].finish_reason == "stop"


def test_any_token_id_may_be_an_end_token(params):
    last = params.config.vocab_size - 1
    assert generate_options._end_tokens(params, [0, last]) == (0, last)
    assert generate_options._end_tokens(params, 0) == (0,)


def test_empty_end_tokens_never_stop(params):
    free = alone(max_new_tokens=11, eos_token_id=())
    stopping = with_defaults(params, eos_token_id=free.token_ids[0])
    assert len(generate(stopping, PROMPTS[1], max_new_tokens=11).token_ids) == 1
    assert len(generate(stopping, PROMPTS[1], max_new_tokens=11, eos_token_id=[]).token_ids) == 11


def test_end_tokens_of_the_tokenizer_are_the_default(texts, monkeypatch):
    end = texts.tokenizer.eos_token_ids[0]
    word = texts.tokenizer.encode("the", add_special_tokens=False)
    (out,) = forced(texts, [[*word, end, *word]], monkeypatch, eos_token_id=None)
    assert out.token_ids == [*word, end]
    assert out.finish_reason == "stop"
    assert out.text == "the"


# Text


STOPS = (
    ("one. two. three", "two", "one. "),
    ("one. two. three", ["zzz", "o. t", "e. t"], "on"),
    ("aaab", "aab", "a"),
    ("the cat in the hat", ("hat",), "the cat in the "),
    ("the cat in the ha", "hat", "the cat in the ha"),
    (
        "caf\N{LATIN SMALL LETTER E WITH ACUTE}\n\nnext",
        "\n\n",
        "caf\N{LATIN SMALL LETTER E WITH ACUTE}",
    ),
    ("stop", "stop", ""),
    ("no stop at all", [], "no stop at all"),
)


def test_stop_strings_are_cut_off_even_across_tokens(texts, monkeypatch):
    for text, stop, expected in STOPS:
        pieces = []
        (out,) = forced(texts, [text], monkeypatch, stop=stop, streamer=[pieces.append])
        assert out.text == "".join(pieces) == expected
        assert out.finish_reason == ("length" if expected == text else "stop")
        assert texts.tokenizer.decode(out.token_ids).startswith(expected)


@pytest.fixture(scope="module")
def pieces(texts):
    """The same model with a SentencePiece tokenizer, whose words begin with a space."""
    metadata = GGUFFile(TOKENIZERS / "llama.gguf").metadata
    return dataclasses.replace(texts, tokenizer=Tokenizer.from_gguf(metadata))


def test_space_between_prompt_and_response_is_kept(pieces, monkeypatch):
    words = [264, 266, 264]  # " t", " a"
    streamed = []
    (out,) = forced(pieces, [words], monkeypatch, prompt=[[275]], streamer=[streamed.append])
    assert out.text == "".join(streamed) == " t a t"
    (out,) = forced(pieces, [words], monkeypatch, prompt=[[275]], stop=" t")
    assert (out.text, out.token_ids) == ("", words[:1])


@pytest.mark.parametrize(("keep", "text"), [(False, " t"), (True, " t</s>")])
def test_stop_string_may_be_a_control_token(pieces, monkeypatch, keep, text):
    options = SamplingParams(
        max_tokens=3, stop=["</s>"], ignore_eos=True, include_stop_str_in_output=keep
    )
    (out,) = forced(pieces, [[264, 2, 266]], monkeypatch, prompt=[[275]], sampling=options)
    assert (out.text, out.token_ids, out.finish_reason) == (text, [264, 2], "stop")


def test_stop_string_that_can_never_match_is_refused(pieces, monkeypatch):
    with pytest.raises(ValueError, match=r"stop='</s>\\n': can never match.*'</s>'.*must be"):
        generate(pieces, [275], stop="</s>\n", max_new_tokens=3)
    options = SamplingParams(
        max_tokens=3, stop="</s> a", skip_special_tokens=False, ignore_eos=True
    )
    (out,) = forced(pieces, [[264, 2, 266]], monkeypatch, prompt=[[275]], sampling=options)
    assert (out.text, out.finish_reason) == (" t", "stop")


def test_stop_is_detected_as_early_as_possible(texts, monkeypatch):
    (out,) = forced(texts, ["ab. cdefgh"], monkeypatch, stop=". c")
    assert texts.tokenizer.decode(out.token_ids) == "ab. c"


def test_pieces_arrive_during_generation_and_never_in_halves(texts, monkeypatch):
    text = "\N{GREEK SMALL LETTER ALPHA}\N{SNOWMAN} the end\N{GRINNING FACE}s"
    streams = [[], []]
    outs = forced(texts, [text, "w on"], monkeypatch, streamer=[s.append for s in streams])
    assert outs[0].text == text
    for pieces, out in zip(streams, outs, strict=True):
        assert "".join(pieces) == out.text
        assert all(pieces)
    assert len(streams[0]) > 5
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(streams[0])


def test_incomplete_character_at_the_end_is_shown(texts, monkeypatch):
    pieces = []
    ids = texts.tokenizer.encode("a\N{SNOWMAN}", add_special_tokens=False)[:-1]
    (out,) = forced(texts, [ids], monkeypatch, streamer=[pieces.append])
    assert out.text == texts.tokenizer.decode(ids) == "".join(pieces)
    assert out.text.startswith("a\N{REPLACEMENT CHARACTER}")


def test_stop_string_completed_by_the_flush_still_stops(texts, monkeypatch):
    """The text's end is held back as an incomplete character; it is the stop string itself."""
    ids = texts.tokenizer.encode("a\N{SNOWMAN}", add_special_tokens=False)[:-1]
    (out,) = forced(texts, [ids], monkeypatch, stop="\N{REPLACEMENT CHARACTER}")
    assert (out.text, out.finish_reason) == ("a", "stop")


# Sampling


def dense_logits(params, text):
    """The logits of one pass, [tokens, V]; texts are padded, so that all share one program."""
    logits = jsparse.logits(params, text + [0] * (64 - len(text)))
    return np.asarray(logits)[0, : len(text)]


def test_logprobs_are_those_of_the_dense_model(params):
    """They are the model's own softmax, with any sampling options."""
    outs = batch(
        max_new_tokens=8, temperature=0.7, top_k=9, repetition_penalty=1.3, logprobs=True,
        eos_token_id=(),
    )  # fmt: skip
    for prompt, out in zip(PROMPTS, outs, strict=True):
        logits = dense_logits(params, [*prompt, *out.token_ids]).astype(np.float64)
        for i, token in enumerate(out.token_ids):
            row = logits[len(prompt) - 1 + i]
            expected = row[token] - row.max() - np.log(np.exp(row - row.max()).sum())
            assert out.logprobs[i] == pytest.approx(expected, abs=1e-4)


def test_seeds_repeat_and_differ():
    def run(seed, **more):
        outs = batch(max_new_tokens=12, temperature=2.0, seed=seed, **more)
        return outs[1].token_ids

    assert run(3) == run(3, stop=())  # compiled again
    assert len({tuple(run(seed)) for seed in (0, 1, 2, 3)}) == 4
    # the upper half of a long seed also counts
    assert run(2**40) != run(0)
    assert run(2**63 - 1) != run(2**32 - 1)


def test_draws_of_a_row_do_not_depend_on_the_other_rows():
    options = {"max_new_tokens": 10, "temperature": 2.0, "seed": 7, "eos_token_id": ()}
    first, second, _ = ALL
    one = batch(**options)
    two = batch((first[:5], second, first), **options)
    assert one[1].token_ids == two[1].token_ids
    assert one[0].token_ids != two[0].token_ids
    same = batch((first,) * 3, **options)
    assert len({tuple(out.token_ids) for out in same}) == 3


@shared
def by_defaults(**options):
    """The results for the prompts on a model with defaults for the sampling options."""
    params = tiny_params(num_layers=1)
    params = with_defaults(params, temperature=1.5, top_k=20, repetition_penalty=2.0)
    return generate(params, PROMPTS, max_new_tokens=10, **options)


def test_generation_defaults_are_used_and_overridden():
    plain = batch(max_new_tokens=10)
    given = batch(max_new_tokens=10, seed=4, temperature=1.5, top_k=20, repetition_penalty=2.0)
    off = by_defaults(temperature=0, repetition_penalty=1.0)
    for row, out in enumerate(by_defaults(seed=4)):
        assert out.token_ids == given[row].token_ids != plain[row].token_ids
        assert off[row].token_ids == plain[row].token_ids


# Options per prompt


MIXED = [
    SamplingParams(temperature=1.5, seed=4, max_tokens=9, ignore_eos=True, logprobs=0),
    SamplingParams(max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=7, min_p=0.01, seed=2**40, max_tokens=7),
    SamplingParams(repetition_penalty=3.0, max_tokens=9, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=2.0, top_p=0.7, seed=4, max_tokens=6, ignore_eos=True),
]


@shared
def by_own_options(order):
    prompts, options = ([values[i] for i in order] for values in (PROMPTS, MIXED[1:4]))
    return generate(tiny_params(num_layers=1), prompts, sampling=options)


def test_options_follow_their_prompt():
    outs, again = by_own_options((0, 1, 2)), by_own_options((2, 0, 1))
    assert [len(out.token_ids) for out in outs] == [5, 7, 9]
    assert [out.logprobs is None for out in outs] == [True, True, False]
    assert [out.token_ids for out in again] == [outs[i].token_ids for i in (2, 0, 1)]
    greedy = batch(max_new_tokens=12, eos_token_id=())
    assert outs[0].token_ids == greedy[0].token_ids[:5]
    assert outs[2].token_ids != greedy[2].token_ids[:9]


def test_prompts_stop_by_their_own_rules(texts, monkeypatch):
    options = [
        SamplingParams(stop="two", ignore_eos=True),
        SamplingParams(stop_token_ids=texts.tokenizer.encode(".", add_special_tokens=False)),
    ]
    text = "one. two. three"
    ids = texts.tokenizer.encode(text, add_special_tokens=False)
    steps = len(ids)
    outs = forced(
        texts,
        [text] * 2,
        monkeypatch,
        sampling=[dataclasses.replace(own, max_tokens=steps) for own in options],
    )
    assert [out.finish_reason for out in outs] == ["stop", "stop"]
    assert outs[0].text == "one. "
    assert outs[1].token_ids == ids[: len(outs[1].token_ids)]
    assert outs[1].text.startswith("one")


@shared
def programs_for_options():
    """The numbers of step programs after each of several runs, counting those after two."""
    params, counts = tiny_params(num_layers=1), []

    def run(*options):
        own = [SamplingParams(max_tokens=n, **each) for n, each in enumerate(options, 4)]
        generate(params, PROMPTS, sampling=own)
        counts.append(traces(driver.decode_steps)[0])

    run({}, {"temperature": 0, "top_k": 3}, {"logprobs": 0, "ignore_eos": True})
    run({"temperature": 0.7}, {}, {"repetition_penalty": 1.5})
    run({"seed": 4}, {"stop_token_ids": [1, 2]}, {"min_p": 0.5})
    run({"top_p": 0.5, "temperature": 2.0}, {"top_k": 10**9}, {"temperature": 1e-3})
    run({"seed": 2**63 - 1, "temperature": 1}, {"min_p": 0.5}, {"top_k": 1})
    run({}, {}, {})
    return counts


def test_two_programs_serve_all_options():
    """One for greedy rows only, one for mixed rows; no value compiles another."""
    _, second, *later = programs_for_options()
    assert set(later) == {second}


def test_sampling_excludes_single_options(params):
    for options in (
        {"max_new_tokens": 5},
        {"temperature": 0.5},
        {"top_k": 0},
        {"top_p": 1.0},
        {"min_p": 0.0},
        {"repetition_penalty": 1.0},
        {"eos_token_id": []},
        {"logprobs": True},
    ):
        with pytest.raises(ValueError, match="sampling: must not be given with other options"):
            jsparse.generate(params, [1], sampling=SamplingParams(), **options)


# Statistics


def test_statistics_of_dense(params):
    out = batch(max_new_tokens=12, eos_token_id=())
    for row, prompt in zip(out, PROMPTS, strict=True):
        assert (row.stats.prompt_tokens, row.stats.new_tokens) == (len(prompt), 12)
        assert row.stats.attended_fraction == row.stats.read_fraction == 1.0
        assert row.stats.prefill_seconds > 0
        assert row.stats.decode_tokens_per_second > 0
    one = generate(params, PROMPTS, max_new_tokens=1)[0].stats
    assert one.attended_fraction is one.read_fraction is one.decode_tokens_per_second is None


def test_statistics_of_streaming_match_hand_counting(params):
    """They count only the steps that made this row's tokens, even if other rows continue."""
    sink, recent, page, steps = 4, 11, 8, 20
    policy = f"streaming(sink={sink}, recent={recent})"
    free = generate(
        params, PROMPTS, max_new_tokens=steps, policy=policy, page_size=page, eos_token_id=[]
    )
    ends = free[0].token_ids[4]
    outs = generate(
        params, PROMPTS, max_new_tokens=steps, policy=policy, page_size=page, eos_token_id=ends
    )
    assert len({len(out.token_ids) for out in outs}) > 1
    for prompt, out in zip(PROMPTS, outs, strict=True):
        attended, read = [], []
        for length in range(len(prompt) + 1, len(prompt) + len(out.token_ids)):
            slots = {s for s in range(length) if s < sink or s >= length - recent}
            attended.append(len(slots) / length)
            read.append(
                sum(min(page, length - page * p) for p in {s // page for s in slots}) / length
            )
        assert out.stats.attended_fraction == pytest.approx(np.mean(attended))
        assert out.stats.read_fraction == pytest.approx(np.mean(read))
    assert outs[0].stats.attended_fraction < 0.5


def test_progress_counts_up_to_the_end(params):
    calls = []
    generate(
        params,
        PROMPTS,
        max_new_tokens=5,
        eos_token_id=[],
        on_progress=lambda *call: calls.append(call),
    )
    assert [c for c in calls if c[0] == "prefill"][-1] == ("prefill", 37, 37)
    assert [c for c in calls if c[0] == "decode"] == [("decode", n, 5) for n in range(1, 6)]


# Schedules


def test_maintenance_and_corrections_run_on_time(params, monkeypatch):
    """11 tokens are 10 steps, with maintenance after steps 3, 6 and 9.

    Corrections come after steps 4 and 8, with the newest 4 tokens.
    """
    calls = []

    def maintain(state, view):
        jax.debug.callback(lambda at: calls.append(("maintain", int(at))), view.positions[0])
        return state, view.cache

    correct = driver.correct

    def watched(decoder, policy, weights, tokens, cache, state, read_only):
        calls.append(("correct", int(np.asarray(cache.positions)[0])))
        newest.append(np.asarray(tokens))
        return correct(decoder, policy, weights, tokens, cache, state, read_only)

    newest = []
    monkeypatch.setattr(driver, "correct", watched)
    policy = dense()._replace(services=Services(maintain, period=3, correct_every=4))
    out = generate(params, PROMPTS[1], max_new_tokens=11, eos_token_id=[], policy=policy)
    jax.effects_barrier()
    assert sorted(at - 18 for what, at in calls if what == "maintain") == [3, 6, 9]
    assert [at - 18 for what, at in calls if what == "correct"] == [4, 8]
    assert [t[0].tolist() for t in newest] == [out.token_ids[:4], out.token_ids[4:8]]
    assert out.token_ids == alone(max_new_tokens=11, eos_token_id=()).token_ids


def test_row_without_room_ends_and_the_others_continue(params):
    def maintain(state, view):
        overflow = view.cache.overflow.at[1].set(True)
        return state, view.cache._replace(overflow=overflow)

    policy = dense()._replace(services=Services(maintain, period=4))
    whole = batch(max_new_tokens=12, eos_token_id=())
    outs = generate(params, PROMPTS, policy=policy, max_new_tokens=12, eos_token_id=[])
    assert [out.finish_reason for out in outs] == ["length", "overflow", "length"]
    assert [out.token_ids for out in outs] == [
        whole[0].token_ids,
        whole[1].token_ids[:5],
        whole[2].token_ids,
    ]


# Compilations


def compilations():
    return traces(
        driver.decode_steps,
        driver.first_tokens,
        session_prefill.first_logits,
        store.empty_rows,
        prefill.prefill_chunk,
    )


def test_other_prompts_of_the_same_size_compile_nothing(params):
    def run(prompts, policy, **options):
        options = {"max_new_tokens": 20, "page_size": 8, "max_length": None} | options
        generate(params, prompts, policy=policy, **options)

    run(PROMPTS, "streaming(sink=4, recent=11)")
    before = compilations()
    # another seed and end token, other lengths in the same bucket, the same policy spelled
    # differently
    run(random_prompts((33, 5, 40), seed=9), "streaming( recent = 11 )", seed=8, eos_token_id=[1])
    run(PROMPTS, jsparse.streaming(recent=11), stop=())
    run(PROMPTS, jsparse.parse_policy("streaming(4, 11)"))
    assert compilations() == before
    # another number of new tokens, and prompts of one chunk and of several
    run(random_prompts((3, 130, 70), seed=9), "streaming(sink=4, recent=11)")
    run(PROMPTS, "streaming(4, 11)", max_new_tokens=200)
    assert compilations() == before
    assert before[0] > 0


@shared
def compilations_by_load():
    counts = []
    for _ in range(2):
        generate(jsparse.load(GGUF, dtype="float32"), "the", max_new_tokens=4)
        counts.append(compilations())
    return counts


def test_model_loaded_twice_shares_its_compilations():
    once, twice = compilations_by_load()
    assert once == twice


class Stopped(Exception):
    """Raised in place of work that a test does not need."""


def test_max_length_is_the_capacity(params, monkeypatch):
    specs = []

    def stop(spec, policy):
        specs.append(spec)
        raise Stopped

    monkeypatch.setattr(capacity, "require_fit", stop)
    for options in ({"max_length": 100, "page_size": 16}, {"page_size": 64}):
        with pytest.raises(Stopped):
            jsparse.generate(params, PROMPTS[2], max_new_tokens=2, **options)
    assert [(s.page_size, s.num_pages, s.capacity) for s in specs] == [(16, 7, 112), (64, 8, 512)]


# Refusals


BAD = [
        ([], {}, ["prompt", "at least one prompt"]),
        ([[]], {}, ["prompt[0]", "empty", "at least one token"]),
        (np.zeros(0, np.int32), {}, ["prompt", "empty"]),
        ([[1], []], {}, ["prompt[1]", "empty"]),
        ([1, 300], {}, ["prompt", "300", "0 to 299"]),
        ([[1], [2, -1]], {}, ["prompt[1]", "-1", "0 to 299"]),
        (np.array([1.0, 2.0]), {}, ["prompt", "float64", "integers"]),
        (np.zeros((1, 1, 1), np.int32), {}, ["prompt", "3 axes"]),
        (7, {}, ["prompt=7", "text"]),
        ([1, "a"], {}, ["prompt=1", "token ids"]),
        ([True], {}, ["prompt=True", "token ids"]),
        ("text", {}, ["tokenizer", "tiny"]),
        ([{"role": "user", "content": "x"}], {}, ["tokenizer", "tiny"]),
        ([1] * 500, {"max_new_tokens": 13}, ["500", "max_new_tokens=13", "513", "at most 512"]),
        ([1] * 9, {"max_length": 16, "max_new_tokens": 8},
         ["9 tokens", "max_new_tokens=8", "17", "at most 16"]),
        ([1], {"max_length": 0}, ["max_length=0", "at least 1"]),
        ([1], {"max_length": 12.5}, ["max_length=12.5", "integer"]),
        ([1], {"max_new_tokens": 0}, ["max_new_tokens=0", "at least 1"]),
        ([1], {"max_new_tokens": None}, ["max_new_tokens=None", "integer"]),
        ([1], {"page_size": 12}, ["page_size=12", "8, 16, 32, 64"]),
        ([1], {"page_size": 16.0}, ["page_size=16.0", "8, 16, 32, 64"]),
        ([1], {"temperature": -0.1}, ["temperature=-0.1", "at least 0"]),
        ([1], {"sampling": 3}, ["sampling=3", "or a list of them"]),
        ([1], {"sampling": []}, ["0 entries", "each of the 1 prompt"]),
        ([[1], [2]], {"sampling": [SamplingParams()]}, ["1 entries", "each of the 2 prompt"]),
        ([1], {"sampling": SamplingParams(max_tokens=512)}, ["max_new_tokens=512", "at most 512"]),
        ([1], {"sampling": SamplingParams(), "seed": -1}, ["seed=-1", "0 to 2^63 - 1"]),
        ([1], {"seed": -1}, ["seed=-1", "0 to 2^63 - 1"]),
        ([1], {"seed": 2**63}, [f"seed={2**63}", "2^63"]),
        ([1], {"seed": 1.0}, ["seed=1.0", "integer"]),
        ([1], {"eos_token_id": 300}, ["eos_token_id=300", "0 to 299"]),
        ([1], {"eos_token_id": [1, -2]}, ["eos_token_id=-2", "0 to 299"]),
        ([1], {"eos_token_id": "x"}, ["eos_token_id='x'", "token ids"]),
        ([1], {"eos_token_id": 1.5}, ["eos_token_id=1.5", "token ids"]),
        ([1], {"stop": "x"}, ["stop", "tokenizer"]),
        ([1], {"streamer": 3}, ["streamer=3", "callable"]),
        ([[1], [2]], {"streamer": [print]}, ["streamer", "each of the 2"]),
        ([1], {"policy": "nonesuch(3)"},
         ["policy='nonesuch(3)'", "unknown policy 'nonesuch'", "streaming"]),
        ([1], {"policy": "streaming(sink=-1)"}, ["sink=-1", "at least 0"]),
        ([1], {"policy": "streaming(window=3)"},
         ["policy='streaming(window=3)'", "window", "sink"]),
        ([1], {"policy": "streaming(sink=4"}, ["policy='streaming(sink=4'", "expression"]),
        ([1], {"policy": "__import__('os')"}, ["policy=", "unknown policy"]),
        ([1], {"policy": 5}, ["policy=5", "expression"]),
]  # fmt: skip


def test_bad_input_is_refused(params):
    for prompt, options, said in BAD:
        with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
            jsparse.generate(params, prompt, **options)
        assert all(part in str(error.value) for part in said), (options, str(error.value))


def test_capacity_beyond_memory_is_refused_before_anything_is_allocated(params, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda **_: 3 * 2**20)
    monkeypatch.setattr(store, "empty_rows", lambda *_: pytest.fail("allocated"))
    # K and V · layers · rows · heads · 512 slots · 16 · 4 bytes: 4 MiB for 32 rows
    with pytest.raises(
        ValueError, match=r"max_length=512 for 32 prompt\(s\) takes \S+ MiB .* free"
    ):
        jsparse.generate(params, [[1]] * 32, max_new_tokens=2, max_length=512)


def test_memory_includes_the_policys_state(params, monkeypatch):
    def stop(*_, **__):
        raise Stopped

    monkeypatch.setattr(memory, "available_bytes", lambda **_: 3 * 2**20)
    monkeypatch.setattr(session.Session, "prefill", stop)
    with pytest.raises(Stopped):
        jsparse.generate(params, [1], max_new_tokens=2, max_length=512)
    heavy = dense()._replace(init=lambda spec: jnp.zeros((1024, 1024)))
    with pytest.raises(ValueError, match="must fit"):
        jsparse.generate(params, [1], max_new_tokens=2, max_length=512, policy=heavy)


def test_speed_counts_only_returned_tokens(params, monkeypatch):
    """A step takes a second. One row ends at once, the others continue at two tokens per second."""
    clock = iter(range(1000))
    monkeypatch.setattr(turn, "clock", lambda: float(next(clock)))
    free = generate(params, PROMPTS, max_new_tokens=12, eos_token_id=[])
    assert free[0].stats.decode_tokens_per_second == pytest.approx(3.0)
    end = free[0].token_ids[0]
    assert not any(end in out.token_ids for out in free[1:])
    outs = generate(params, PROMPTS, max_new_tokens=12, eos_token_id=end)
    assert [len(out.token_ids) for out in outs] == [1, 12, 12]
    assert outs[0].stats.decode_tokens_per_second == pytest.approx(2.0)


def test_logits_that_do_not_fit_are_refused(params, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda **_: 2**16)
    with pytest.raises(
        ValueError, match=r"tokens of shape \(1, 64\) take .* must fit in the 64.00 KiB"
    ):
        jsparse.logits(params, [1] * 64)


def test_bad_tokens_for_logits_are_refused(params):
    for tokens, said in (
        ([], ["(1, 0)", "at least one"]),
        ([[[1]]], ["(1, 1, 1)", "[B, T]"]),
        ([1.0], ["float64", "integers"]),
        ([1, 300], ["300", "0 … 299"]),
        ([-1], ["-1", "0 … 299"]),
        ([1] * 513, ["513", "512"]),
    ):
        with pytest.raises(ValueError, match="tokens") as error:
            jsparse.logits(params, tokens)
        assert all(part in str(error.value) for part in said), (tokens, str(error.value))
