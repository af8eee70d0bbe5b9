"""Makes small engines of a tiny model, and compares what requests get."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import pytest

import jsparse
from jsparse.engine.llm import LLM
from jsparse.engine.request_state import RequestState
from jsparse.engine.sizes import MAX_PREFILLS
from jsparse.runtime.request import Request, requests
from tests.support.tiny import tiny_params

# chunks of two sizes, so that a prompt's chunks begin where position says
LADDER = ((0, 16), (32, 8))
PAGE = 8
# four slots; programs are compiled when they are needed, of all slots unless a test asks for more;
# a row that decodes waits for no more than a chunk
SMALL: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_model_len": 96,
    "kv_cache_tokens": 192,
    "page_size": PAGE,
    "ladder": LADDER,
    "prepare": False,
    "max_stall_ms": 0,
}


def tiny_llm(policy: Any = "dense", *, params: Any = None, **options: Any) -> LLM:
    """A small LLM over the tiny model."""
    return LLM(params or tiny_params(num_layers=2), policy, **small(**options))


def small(**options: Any) -> dict[str, Any]:
    """Options of a small engine."""
    options = SMALL | options
    bits = {"steps_per_program", "decode_rows", "prefill_rows"} & options.keys()
    own = {"decode_rows": [options["max_num_seqs"]], "batch_invariant": not bits}
    return own | options


def greedy(tokens: int = 12, **options: Any) -> jsparse.SamplingParams:
    """Options of a request that takes the likeliest tokens and reports their log-probabilities."""
    return jsparse.SamplingParams(
        **{"temperature": 0, "max_tokens": tokens, "logprobs": 0} | options
    )


def bits(out: jsparse.RequestOutput) -> list[tuple[list[int], list[float] | None]]:
    """What must not depend on what runs beside a request."""
    return [(answer.token_ids, answer.token_logprobs) for answer in out.outputs]


def asked(llm: LLM, prompt: Any, options: jsparse.SamplingParams) -> Request:
    """The request of a prompt, as an engine takes it."""
    (made,) = requests(llm.engine.params, [prompt], options, llm.engine.policy)
    return made


def until(llm: LLM, reached: Callable[[], Any], maximum: int = 200) -> list[RequestState]:
    """Steps until something is so; the requests that were heard of."""
    updates = []
    for _ in range(maximum):
        if reached():
            return updates
        updates += llm.engine.step()
    raise AssertionError("never came about")


def assert_at_rest(llm: LLM) -> None:
    """All memory is free or cached, no slot is held, nothing is left of any request."""
    engine = llm.engine
    scheduler, pool = engine.scheduler, engine.scheduler.pool
    scheduler.plan()
    assert scheduler.idle
    assert engine.idle
    assert pool.available == pool.size
    assert engine._free_slots == engine.sizes.num_slots
    assert not engine._live
    assert not engine._requests
    assert len(scheduler.prompts._places) == MAX_PREFILLS


def hold(
    engine: jsparse.AsyncEngine, patch: pytest.MonkeyPatch, *, at_once: bool = False
) -> threading.Event:
    """Makes the engine's thread wait, whenever it has reported tokens, while the event is clear.

    So a request lives until a test has looked at it. With `at_once`, nobody hears that a request
    was accepted before its first tokens are there.
    """
    wake, go_on = engine._wake, threading.Event()

    def wake_and_wait(listeners):
        begun = any(each.state and each.state.metrics.token_times for each in listeners)
        if begun or not at_once:
            wake(listeners)
        if begun:
            go_on.wait(90)  # longer than clients do

    patch.setattr(engine, "_wake", wake_and_wait)
    return go_on


def hand_over(engine: jsparse.AsyncEngine, patch: pytest.MonkeyPatch) -> None:
    """Makes the engine's thread wait, after each report, until those who got it ask for the next.

    Each report is then an output of its own; otherwise those that come too fast become one. Whoever
    uses it reads all outputs to the end.
    """
    wake = engine._wake

    def wants_more(listener):
        return listener.state.finished or bool(listener.ready._waiters)

    async def turns(listeners):
        while any(each.ready.is_set() or not wants_more(each) for each in listeners):
            await asyncio.sleep(0.001)

    def wake_and_wait(listeners):
        wake(listeners)
        for loop in {each.loop for each in listeners}:
            waiting = turns([each for each in listeners if each.loop is loop])
            try:
                had = asyncio.run_coroutine_threadsafe(waiting, loop)
                while not (had.done() or loop.is_closed()):
                    wait([had], 0.05)
            except RuntimeError:  # the loop has been closed
                pass
            waiting.close()

    patch.setattr(engine, "_wake", wake_and_wait)
