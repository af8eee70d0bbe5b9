"""Makes small engines of a tiny model, and compares the results of requests."""

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

# chunks of two sizes, so that a prompt's chunks start at fixed positions
LADDER = ((0, 16), (32, 8))
PAGE = 8
# four slots; programs are compiled on demand, for all slots unless a test asks for more; a decoding
# row stalls for at most one chunk
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
    """The results that must not depend on concurrent requests."""
    return [(answer.token_ids, answer.token_logprobs) for answer in out.outputs]


def asked(llm: LLM, prompt: Any, options: jsparse.SamplingParams) -> Request:
    """The request for a prompt, as an argument of an engine."""
    (made,) = requests(llm.engine.params, [prompt], options, llm.engine.policy)
    return made


def until(llm: LLM, reached: Callable[[], Any], maximum: int = 200) -> list[RequestState]:
    """Steps until a condition holds; returns the requests with updates."""
    updates = []
    for _ in range(maximum):
        if reached():
            return updates
        updates += llm.engine.step()
    raise AssertionError("never came about")


def assert_at_rest(llm: LLM) -> None:
    """All memory is free or cached, all slots are free, and no state of any request is left."""
    engine = llm.engine
    scheduler, pool = engine.scheduler, engine.scheduler.pool
    scheduler.plan()
    assert scheduler.idle
    assert engine.idle
    assert pool.available == pool.size
    assert pool.pinned == 0
    assert engine._free_slots == engine.sizes.num_slots
    assert not engine._live
    assert not engine._requests
    assert len(scheduler.prompts._places) == MAX_PREFILLS


def hold(
    engine: jsparse.AsyncEngine, patch: pytest.MonkeyPatch, *, at_once: bool = False
) -> threading.Event:
    """Makes the engine's thread wait after each report of tokens while the event is clear.

    A request thus lives until a test has inspected it. With `at_once`, the acceptance of a request
    is reported together with its first tokens.
    """
    wake, go_on = engine._wake, threading.Event()

    def wake_and_wait(listeners):
        begun = any(each.state and each.state.metrics.token_times for each in listeners)
        if begun or not at_once:
            wake(listeners)
        if begun:
            go_on.wait(90)  # longer than the timeouts of clients

    patch.setattr(engine, "_wake", wake_and_wait)
    return go_on


def hand_over(engine: jsparse.AsyncEngine, patch: pytest.MonkeyPatch) -> None:
    """Makes the engine's thread wait after each report until its receivers ask for the next.

    Each report is then a separate output; otherwise fast reports are merged. Users of this function
    must read all outputs to the end.
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
