"""Sends many requests to a server on loopback, half of them hostile, and looks for what is left.

JSPARSE_SOAK is their number, 200 if it is not set.
"""

import asyncio
import os
import random
import threading
from pathlib import Path

import httpx
import psutil
import pytest

import jsparse
from jsparse.server import connections
from jsparse.server.front import Options
from jsparse.server.service import Service
from tests.support.raw_http import get, post
from tests.support.serving_http import at_rest, serving

REQUESTS = int(os.environ.get("JSPARSE_SOAK", "200"))
TINY = Path(__file__).parents[1] / "fixtures" / "hf" / "llama3" / "model.gguf"
WORDS = ("the", "sea", "and", "a", "ship", "under", "old", "stars", "that", "nobody", "named")
# threads of pools, which grow up to their sizes
POOLS = ("asyncio_", "jsparse-tokenise")


COMPLETIONS = "/v1/completions"
LONG = {"prompt": "the sea", "max_tokens": 90, "ignore_eos": True}
# what hostile clients send, and whether they wait until they are told to go
HOSTILE = {
    "half a head": (b"GET /health HTTP/1.1\r\nhost", True),
    "no HTTP": (b"\x16\x03\x01\x02\x00", True),
    "a head without end": (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 2**15, True),
    "half a body": (post(COMPLETIONS, LONG)[:-1], False),
    "a body too long": (post(COMPLETIONS, b"{", length=2**30), True),
    "bytes after an answer": (post("/nothing", b"", length=9) + b"x", True),
    "a hang-up": (post(COMPLETIONS, LONG), False),
    "a hang-up in a stream": (post(COMPLETIONS, LONG | {"stream": True}), False),
    "a hang-up behind a request": (post(COMPLETIONS, LONG) + get("/health"), False),
    "characters of no text": (
        post(COMPLETIONS, LONG | {"logit_bias": {"111": 100}, "stop": ["zz"]}),
        True,
    ),
    "a text far too long": (post(COMPLETIONS, LONG | {"prompt": "1" * 10**6}), True),
    "likely tokens that nobody reads": (
        post(COMPLETIONS, LONG | {"logprobs": 20, "n": 4, "stream": True}),
        False,
    ),
}


async def hostile(url, kind, rng):
    """Does what a client that means no good does."""
    host, _, port = url.removeprefix("http://").partition(":")
    sent, waits = HOSTILE[kind]
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**12)
    try:
        writer.write(sent)
        if waits:
            while await reader.read(2**16):
                pass
        else:
            await asyncio.sleep(rng.uniform(0, 1))
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()


async def soak(url, count, rng, ends):
    """Sends requests of at most 16 tokens, a fifth of which is left, and as many hostile ones."""
    places = asyncio.Semaphore(16)
    # no connection is used again, which the server might close at that moment, since it was idle
    alone = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=alone) as client:

        async def one(nth):
            async with places:
                if nth % 2:
                    kind = rng.choice([*HOSTILE])
                    await hostile(url, kind, rng)
                    ends["hostile"] += 1
                    return
                await good(nth)

        async def good(nth):
            body = {
                "prompt": " ".join(rng.choices(WORDS, k=rng.randint(1, 30))),
                "max_tokens": rng.randint(1, 16),
                "stream": nth % 4 == 0,
                "temperature": rng.choice((0, 1)),
                "ignore_eos": True,
            }
            leaves = rng.random() < 0.2
            try:
                async with asyncio.timeout(rng.uniform(0, 0.3) if leaves else None):
                    got = await client.post(COMPLETIONS, json=body)
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
def test_nothing_is_left_of_many_requests(monkeypatch):
    monkeypatch.setattr(connections, "SECONDS", 2)
    engine = jsparse.AsyncEngine(
        TINY, "quest(budget=64)", max_num_seqs=8, max_model_len=256, prepare=False
    )
    service, process = Service(Options("tiny")), psutil.Process()
    rng, ends = random.Random(0), {"ended": 0, "left": 0, "hostile": 0}
    with serving(service, engine) as url:
        asyncio.run(soak(url, 200, rng, dict(ends)))
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
    assert sum(ends.values()) == REQUESTS and ends["left"]
    assert after[0] <= before[0] and after[1] <= before[1]
    assert after[2] - before[2] < 64 * 2**20
