"""Tests requests that arrive, stream and disconnect while others decode."""

import asyncio
import dataclasses
import itertools
import threading
import time
from functools import cache

import jax
import numpy as np
import pytest
import tokenizers

import jsparse
from jsparse import SamplingParams
from jsparse.engine import async_engine
from jsparse.models.checkpoint import Params
from jsparse.models.tokenizer import Tokenizer
from jsparse.runtime.compilation import traces
from jsparse.text import prompts
from tests.support.serving import hand_over, small
from tests.support.tiny import VOCAB, random_prompts, tiny_params

PROMPTS = random_prompts((9, 21, 3, 41, 16, 5), seed=5)


@cache
def with_words() -> Params:
    """The tiny model with a word per token."""
    core = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{nth}": nth for nth in range(VOCAB)}, unk_token="w0")
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return dataclasses.replace(tiny_params(num_layers=2), tokenizer=Tokenizer(core))


def make_engine(policy="dense", **options):
    return jsparse.AsyncEngine(with_words(), policy, **small(**options))


@pytest.fixture(scope="module")
def engine():
    """An engine whose programs for greedy requests are compiled."""
    made = make_engine(steps_per_program=2)
    asyncio.run(last(made, PROMPTS[3], options(5)))
    yield made
    made.close()


def options(tokens=8, **more):
    return SamplingParams(**{"temperature": 0, "max_tokens": tokens, "logprobs": 0} | more)


async def last(engine, prompt, asked, name=None):
    """The last output of a request."""
    return [out async for out in engine.generate(prompt, asked, name)][-1]


def at_rest(engine):
    """Waits until the thread is idle, then returns whether all memory and slots are free."""
    inner = engine.engine
    for _ in range(1000):
        if not engine._inbox and inner.idle and not inner._requests:
            break
        threading.Event().wait(0.01)
    inner.scheduler.plan()
    pool = inner.scheduler.pool
    return (
        pool.available == pool.size
        and inner._free_slots == inner.sizes.num_slots
        and not (inner._live or inner._requests or engine._listeners)
    )


@pytest.fixture
def in_turn(engine, monkeypatch):
    """Makes the engine's thread wait until coroutines have received its reports."""
    hand_over(engine, monkeypatch)


@pytest.mark.usefixtures("in_turn")
def test_new_parts_add_up_to_the_whole_output(engine):
    asked = options(12, logprobs=2, n=2, temperature=1.0, seed=4)

    async def run():
        texts, ids, logprobs, tops = ["", ""], [[], []], [[], []], [[], []]
        updates = engine.follow("w3 w14", asked)
        first = await anext(updates)
        assert not first.metrics.token_times  # the request has been accepted
        async for state in updates:
            for nth, answer in enumerate(state.output(new=True).outputs):
                texts[nth] += answer.text
                ids[nth] += answer.token_ids
                logprobs[nth] += answer.token_logprobs
                tops[nth] += answer.top_logprobs
        whole = state.output()
        return list(zip(texts, ids, logprobs, tops, strict=True)), whole

    parts, whole = asyncio.run(run())
    assert parts == result(whole) == result(asyncio.run(last(engine, "w3 w14", asked)))
    assert at_rest(engine)


def test_requests_of_one_cache_salt_share_prompts(engine):
    async def cached(salt):
        (out,) = (await last(engine, PROMPTS[3], options(2, cache_salt=salt)),)
        return out.num_cached_tokens, out.outputs[0].token_ids

    assert asyncio.run(cached("a"))[0] == 0
    again, own = asyncio.run(cached("a"))
    other, same = asyncio.run(cached("b"))
    assert again > 0 == other
    assert own == same
    with pytest.raises(ValueError, match="cache_salt=3: must be a string"):
        options(cache_salt=3)


def test_requests_without_a_seed_draw_different_tokens(engine, monkeypatch):
    """From request to request, past the last stream of a seed, and after a restart."""
    asked = options(8, temperature=1.5)
    monkeypatch.setattr(async_engine, "STREAMS", 2)
    drawn = [asyncio.run(last(engine, PROMPTS[0], asked)).outputs[0].token_ids for _ in range(6)]
    assert len({*map(tuple, drawn)}) == 6
    drawn = []
    for _ in range(2):
        monkeypatch.setattr(engine, "_streams", itertools.count())
        monkeypatch.setattr(engine, "_seed", async_engine.drawn_seed())
        drawn.append(asyncio.run(last(engine, PROMPTS[0], asked)).outputs[0].token_ids)
    assert drawn[0] != drawn[1]


def test_more_sequences_than_the_queue_can_hold_are_refused():
    engine = make_engine(max_waiting=1)
    with pytest.raises(ValueError, match="n=6: must be at most 5, max_waiting plus the slots"):
        asyncio.run(last(engine, PROMPTS[0], options(2, n=6, temperature=1.0)))
    engine.close()


def test_stop_strings_end_sequences(engine):
    ids = asyncio.run(last(engine, PROMPTS[0], options(10))).outputs[0].token_ids
    stop = f"w{ids[3]}"
    first = [f"w{token}".startswith(stop) for token in ids].index(True)
    out = asyncio.run(last(engine, PROMPTS[0], options(10, stop=stop))).outputs[0]
    assert out.finish_reason == "stop"
    assert out.token_ids == ids[: first + 1]
    assert stop not in out.text.split()
    kept = options(10, stop=stop, include_stop_str_in_output=True)
    assert asyncio.run(last(engine, PROMPTS[0], kept)).outputs[0].text.endswith(stop)


def test_abort_ends_the_generator_with_the_partial_output(engine):
    async def run():
        outs = []
        async for out in engine.generate(PROMPTS[1], options(60), "mine"):
            outs.append(out)
            if len(out.outputs[0].token_ids) > 3:
                await engine.abort("mine")
        return outs

    final = asyncio.run(run())[-1]
    assert final.finished
    assert final.outputs[0].finish_reason == "abort"
    assert 3 < len(final.outputs[0].token_ids) < 60
    assert at_rest(engine)


def test_bad_requests_fail_alone(engine):
    async def run():
        good = asyncio.create_task(last(engine, PROMPTS[0], options(6)))
        for prompt, asked, message in (
            ([VOCAB], None, "token id 300"),
            (PROMPTS[:2], None, "prompt holds 2 prompts: must be one"),
            (PROMPTS[3], options(90), "must be at most max_model_len=96"),
            ("w1", options(stop_token_ids=[VOCAB]), "stop_token_ids=300"),
        ):
            with pytest.raises(ValueError, match=message):
                await last(engine, prompt, asked)
        return await good

    assert asyncio.run(run()).outputs[0].finish_reason == "length"
    assert at_rest(engine)


def test_device_error_reaches_all_requests(monkeypatch):
    engine = make_engine()

    def fail(*_, **__):
        raise jax.errors.JaxRuntimeError("INTERNAL: injected")

    async def run():
        asked = [last(engine, prompt, options(40)) for prompt in PROMPTS]
        tasks = [asyncio.create_task(each) for each in asked]
        await asyncio.sleep(0)
        monkeypatch.setattr(engine.engine._runner, "run", fail)
        got = await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(jsparse.EngineError, match="has failed: INTERNAL: injected"):
            await last(engine, PROMPTS[0], options(2))
        return got

    got = asyncio.run(run())
    assert all(isinstance(each, jsparse.EngineError) for each in got)
    engine.close()
    assert not engine._thread.is_alive()


def test_close_ends_waiting_requests(monkeypatch):
    async def run():
        async with make_engine() as engine:
            step = engine.engine.step
            # 70 steps take longer than closing does on a busy machine
            monkeypatch.setattr(engine.engine, "step", lambda: time.sleep(0.1) or step())
            task = asyncio.create_task(last(engine, PROMPTS[1], options(70)))
            await asyncio.sleep(0.01)
        with pytest.raises(jsparse.EngineError, match="has been closed"):
            await task
        return engine

    assert not asyncio.run(run())._thread.is_alive()


def kinds():
    """Forty requests of all kinds, some of them with a common prefix."""
    rng = np.random.default_rng(3)
    beginnings = random_prompts((32, 16), seed=7)
    made = []
    for nth in range(40):
        own = rng.integers(VOCAB, size=rng.integers(1, 30)).tolist()
        prompt = [*beginnings[nth % 2], *own] if nth % 4 < 2 else own
        more = (
            {},
            {"temperature": 1.0, "seed": nth},
            {"frequency_penalty": 1.0, "presence_penalty": 0.5},
            {"stop": f"w{nth * 7 % VOCAB}"},
            {"temperature": 0.8, "top_k": 9, "logprobs": 3, "seed": nth},
            {"temperature": 1.2, "n": 2, "seed": nth},
        )[nth % 6]
        made.append((prompt, options(int(rng.integers(1, 24)), **more)))
    return made


def result(out):
    return [(one.text, one.token_ids, one.token_logprobs, one.top_logprobs) for one in out.outputs]


@pytest.fixture(scope="module")
def experienced():
    """An engine that has served these requests, the requests, and the result of each one alone."""
    engine, asked = make_engine(max_waiting=2000, steps_per_program=2), kinds()

    async def alone():
        return [result(await last(engine, *one)) for one in asked]

    expected = asyncio.run(alone())
    while engine.engine.programs.compiling:  # some are compiled in the background
        time.sleep(0.01)
    yield engine, asked, expected
    engine.close()


@pytest.mark.slow
def test_many_requests(experienced):
    """200 requests of random lengths and options, a fifth aborted at random, a twentieth bad.

    Each other request gets the result that it gets alone, and no state is left.
    """
    engine, asked, expected = experienced
    before = traces(), engine.engine.programs.compiled
    rng = np.random.default_rng(8)
    ends = {"ended": 0, "aborted": 0, "bad": 0}

    async def one(nth):
        await asyncio.sleep(float(rng.uniform(0, 0.5)))
        fate, which = rng.uniform(), int(rng.integers(len(asked)))
        prompt, own = asked[which]
        if fate < 0.05:
            with pytest.raises(ValueError, match=r"must be"):
                await last(engine, prompt if nth % 2 else [-1], options(96))
            ends["bad"] += 1
        elif fate < 0.25:
            seen = 0
            stream = engine.generate(prompt, own, f"r{nth}")
            maximum = int(rng.integers(0, 12))
            if nth % 2:
                hang_up = asyncio.create_task(stream.__anext__())
                await asyncio.sleep(float(rng.uniform(0, 0.2)))
                await engine.abort(f"r{nth}")
                await hang_up
            async for _ in stream:
                seen += 1
                if seen > maximum:
                    break
            await stream.aclose()
            ends["aborted"] += 1
        else:
            out = await last(engine, prompt, own)
            assert result(out) == expected[which]
            ends["ended"] += 1

    async def all_of_them():
        await asyncio.gather(*map(one, range(200)))
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(all_of_them())
    assert sum(ends.values()) == 200
    assert min(ends.values()) > 0
    assert at_rest(engine)
    assert (traces(), engine.engine.programs.compiled) == before


def test_unexpected_error_reaches_all_requests(monkeypatch):
    engine = make_engine()

    def fail(*_, **__):
        raise OSError("disk full")

    async def run():
        first = engine.generate(PROMPTS[1], options(70))
        await anext(first)
        monkeypatch.setattr(engine.engine, "add", fail)
        with pytest.raises(OSError, match="disk full"):
            await last(engine, PROMPTS[0], options(2))
        *_, out = [out async for out in first]
        assert out.outputs[0].finish_reason == "length"

    asyncio.run(run())
    engine.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_dead_engine_thread_fails_requests(monkeypatch):
    engine = make_engine()
    monkeypatch.setattr(engine, "_spread", lambda updates: 1 / 0)
    with pytest.raises(jsparse.EngineError, match="thread has failed: ZeroDivisionError"):
        asyncio.run(last(engine, PROMPTS[1], options(70)))
    engine.close()
    for own in (options(70), options(70, structured_outputs={"regex": "a"})):
        with pytest.raises(jsparse.EngineError, match="has been closed"):
            asyncio.run(last(engine, PROMPTS[1], own))


def test_requests_wait_only_for_their_own_programs_to_compile(engine, monkeypatch):
    compiling = threading.Event()
    compiling.set()
    programs, expected = engine.engine.programs, threading.Event()

    def coming(choice, *, scored=False):
        return (choice == "top" or scored) and compiling.is_set()

    monkeypatch.setattr(programs, "coming", coming)
    monkeypatch.setattr(programs, "expect_scored", expected.set)

    async def run():
        likely = asyncio.create_task(last(engine, PROMPTS[0], options(2, logprobs=2)))
        scored = asyncio.create_task(last(engine, PROMPTS[0], options(2, prompt_logprobs=0), "ps"))
        dropped = asyncio.create_task(last(engine, PROMPTS[0], options(2, logprobs=2), "dropped"))
        other = await last(engine, PROMPTS[1], options(2))
        assert not likely.done()
        await engine.abort("dropped")
        assert (await dropped).outputs[0].finish_reason == "abort"
        assert expected.is_set() and not scored.done()
        await engine.abort("ps")
        assert (await scored).outputs[0].finish_reason == "abort"
        compiling.clear()
        return await likely, other

    assert all(len(out.outputs[0].token_ids) == 2 for out in asyncio.run(run()))
    assert at_rest(engine)


def test_abort_before_tokenisation_takes_effect(engine, monkeypatch):
    held, encode = threading.Event(), prompts.encode

    def slow(*given):
        held.wait()
        return encode(*given)

    monkeypatch.setattr(prompts, "encode", slow)

    async def run():
        task = asyncio.create_task(last(engine, PROMPTS[1], options(60), "early"))
        await asyncio.sleep(0.05)
        with pytest.raises(ValueError, match="request_id='early': must not be that of a live"):
            await last(engine, PROMPTS[1], options(60), "early")
        await engine.abort("early")
        await asyncio.sleep(0.05)
        held.set()
        return await task

    out = asyncio.run(run()).outputs[0]
    assert (out.finish_reason, len(out.token_ids) < 5) == ("abort", True)
    assert at_rest(engine)
