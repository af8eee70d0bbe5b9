"""Tests how the router reads a replica's response: pieces that arrive together, waits, losses."""

import asyncio
import tempfile
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
import uvloop

from jsparse.server.replicas import response
from jsparse.server.replicas.response import Lost, ReplicaResponse

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


@pytest.fixture
def run():
    """Runs a coroutine in the event loop of servers."""

    def runs(work):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(asyncio.wait_for(work, 60))

    return runs


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


@asynccontextmanager
async def asked(*writes, method="GET", target="/", body=None):
    """Yields the response that a replica makes with these writes, and its list of requests."""
    requests = []

    async def answers(reader, writer):
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        if body:
            requests.append(await reader.readexactly(len(body)))
        for data in writes:
            writer.write(data)
            await writer.drain()
        writer.close()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "replica")
        async with await asyncio.start_unix_server(answers, path):
            with closing(await ReplicaResponse.to(path, method, target, body)) as it:
                yield it, requests


async def read(it):
    return [piece async for piece in it.pieces()]


def test_request_and_response(run):
    async def work():
        head = b"HTTP/1.1 429 Too Many\r\nRetry-After: 7\r\nContent-Length: 4\r\n\r\n"
        body = b'{"prompt": 1}'
        async with asked(head, b"full", method="POST", target="/a b\n", body=body) as (it, sent):
            assert await it.begun()
            assert b"".join(await read(it)) == b"full"
            assert (it.status, it.headers) == (429, {"retry-after": "7", "content-length": "4"})
            first, *fields = sent[0].decode().split("\r\n")
            assert first == "POST /a%20b%0A HTTP/1.1"
            assert f"Content-Length: {len(body)}" in fields
            assert "Content-Type: application/json" in fields
            assert sent[1] == body
        async with asked(HEAD + END) as (it, sent):
            assert await it.begun() == b""
            assert await read(it) == []
            assert sent == [b"GET / HTTP/1.1\r\nHost: replica\r\n\r\n"]

    run(work())


def test_pieces_that_arrive_together_are_one(run):
    async def work():
        events = [b"data: %d\n\n" % nth for nth in range(100)]
        async with asked(HEAD, *map(chunk, events), END) as (it, _):
            while not it._whole:
                await asyncio.sleep(0)
            assert await it.begun() == b"".join(events)
            assert await read(it) == [b"".join(events)]

    run(work())


def test_piece_does_not_wait_for_the_next(run):
    async def work():
        go = asyncio.Event()

        async def answers(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(HEAD + chunk(b"one"))
            await go.wait()
            writer.write(chunk(b"two") + END)
            writer.close()

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "replica")
            async with await asyncio.start_unix_server(answers, path):
                with closing(await ReplicaResponse.to(path, "GET", "/")) as it:
                    pieces = it.pieces()
                    assert await anext(pieces) == b"one"
                    go.set()
                    assert [piece async for piece in pieces] == [b"two"]

    run(work())


def test_replica_waits_for_a_slow_reader(run):
    async def work():
        data = bytes(range(256)) * 4096
        async with asked(HEAD, *[chunk(data)] * 16, END) as (it, _):
            while it._transport.is_reading() and not it._whole:
                await asyncio.sleep(0)
            # one read more than the bound at most
            assert response.MAX_BYTES < it._size < len(data)
            assert b"".join(await read(it)) == data * 16

    run(work())


def test_replica_without_a_response_is_lost(run, tmp_path):
    async def work(*writes):
        async with asked(*writes) as (it, _):
            with pytest.raises(Lost):
                await it.begun()

    for writes in ([b""], [HEAD], [b"nonsense\r\n\r\n"]):
        run(work(*writes))
    with pytest.raises(Lost):
        run(ReplicaResponse.to(tmp_path / "nobody", "GET", "/"))


def test_incomplete_response_is_lost_after_its_received_part(run):
    async def work(end, rest):
        async with asked(HEAD + chunk(b"whole"), end) as (it, _):
            come = []

            async def next_prefill():
                async for piece in it.pieces():
                    come.append(piece)

            assert (await it.begun()).startswith(b"whole")
            with pytest.raises(Lost):
                await next_prefill()
            assert b"".join(come) == b"whole" + rest

    for end, rest in ((b"", b""), (b"9\r\nhalf", b"half"), (b"nonsense", b"")):
        run(work(end, rest))
