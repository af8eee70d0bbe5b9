"""Sends many requests to SmolLM2 on loopback, and looks for what is left of them.

JSPARSE_SOAK is their number, 200 if it is not set.
"""

import asyncio
import os
import random
import threading

import httpx
import psutil
import pytest
from serving_http import at_rest, serving

import jsparse
from jsparse.server.service import Options, Service

REQUESTS = int(os.environ.get("JSPARSE_SOAK", "200"))
WORDS = ("the", "sea", "and", "a", "ship", "under", "old", "stars", "that", "nobody", "named")
# threads of pools, which grow up to their sizes
POOLS = ("asyncio_", "jsparse-tokenise")


async def soak(url, count, rng, ends):
    """Sends requests of at most 16 tokens, of which a fifth is left before its end."""
    places = asyncio.Semaphore(16)
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def one(nth):
            body = {
                "prompt": " ".join(rng.choices(WORDS, k=rng.randint(1, 30))),
                "max_tokens": rng.randint(1, 16),
                "stream": nth % 2 == 0,
                "temperature": rng.choice((0, 1)),
                "ignore_eos": True,
            }
            leaves = rng.random() < 0.2
            async with places:
                try:
                    async with asyncio.timeout(rng.uniform(0, 1) if leaves else None):
                        got = await client.post("/v1/completions", json=body)
                except TimeoutError:
                    ends["left"] += 1
                    return
            assert got.status_code == 200, got.text
            assert ("[DONE]" in got.text) == body["stream"]
            ends["ended"] += 1

        await asyncio.gather(*map(one, range(count)))


def threads():
    """The number of threads that are in no pool."""
    return sum(not thread.name.startswith(POOLS) for thread in threading.enumerate())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_nothing_is_left_of_many_requests():
    engine = jsparse.AsyncEngine(
        "smollm2", "quest(budget=64)", max_num_seqs=8, max_model_len=128, prepare=False
    )
    service, process = Service(Options("smollm2")), psutil.Process()
    rng, ends = random.Random(0), {"ended": 0, "left": 0}
    with serving(service, engine) as url:
        asyncio.run(soak(url, 60, rng, dict(ends)))
        assert at_rest(service)
        before = process.num_fds(), threads(), process.memory_info().rss
        asyncio.run(soak(url, REQUESTS, rng, ends))
        assert at_rest(service)
        wait = threading.Event()
        for _ in range(200):  # sockets are closed a little later
            if process.num_fds() <= before[0]:
                break
            wait.wait(0.01)
        after = process.num_fds(), threads(), process.memory_info().rss
    print(ends, before, after)
    assert sum(ends.values()) == REQUESTS and ends["left"] > REQUESTS / 20
    assert after[0] <= before[0] and after[1] <= before[1]
    assert after[2] - before[2] < 64 * 2**20
