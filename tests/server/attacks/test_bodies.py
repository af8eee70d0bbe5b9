"""Attacks through request contents: bodies that never end, far too long texts, names of other
hosts.
"""

import asyncio
import threading

import httpx
import pytest

from jsparse.models.tokenizer import Tokenizer
from jsparse.server import front
from jsparse.server.app import make_app
from jsparse.server.run import Server, own_names
from jsparse.text import prompts
from tests.support.raw_http import answer, connected, crowd, get, post
from tests.support.serving_http import a_service, an_engine, at_rest, serving, soon

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
BRIEF = {"prompt": "w1 w2", "max_tokens": 2, "temperature": 0}
MIB = "w1 " * (2**20 // 3)


@pytest.fixture(scope="module")
def service():
    return a_service(max_waiting=4, hosts=own_names("127.0.0.1", "box", ()))


@pytest.fixture(scope="module")
def url(service):
    with serving(service, an_engine(max_waiting=4)) as address:
        yield address


def is_answered(url):
    got = httpx.post(f"{url}{COMPLETIONS}", json=BRIEF, timeout=60)
    return got.status_code == 200


def test_slow_bodies_block_no_other_client(url, service):
    """More of them than may wait, each a byte short."""
    head = post(COMPLETIONS, BRIEF)[:-1]
    with crowd(url, 16) as peers:
        for peer in peers:
            peer.sendall(head)
        assert soon(lambda: service.inside == 16)
        assert is_answered(url)
        peers[0].sendall(b"}")
        assert answer(peers[0])[0] == 200
    assert at_rest(service)


def test_large_endless_bodies_never_block_small_ones(url, service, monkeypatch):
    monkeypatch.setattr(front, "MIN_BODY", 2**17)
    monkeypatch.setattr(front, "MAX_LARGE_BODIES", 2**17)
    maximum = 10**5
    begun = post(COMPLETIONS, b" " * maximum, length=maximum + 10)
    with crowd(url, 2) as peers:
        peers[0].sendall(begun)
        assert soon(lambda: service.buffered == maximum)
        peers[1].sendall(begun)
        assert answer(peers[1])[0] == 429
        assert is_answered(url)
    assert at_rest(service)


def test_client_that_sends_too_much_gets_the_reason(url, service):
    """The response arrives long before the body ends, and none of it is lost."""
    for chunked in [False, True]:
        size = 2**26
        if chunked:
            head = post(COMPLETIONS, b"", **{"transfer-encoding": "chunked"})
            head = head.replace(b"content-length: 0\r\n", b"") + f"{size:x}\r\n".encode()
        else:
            head = post(COMPLETIONS, b"", length=size)
        with connected(url) as peer:
            peer.sendall(head + b" " * size)
            status, body = answer(peer)
            assert (status, b"too large" in body) == (413, True), chunked
            assert peer.recv(1) == b"", chunked
        assert at_rest(service), chunked


def test_body_has_a_time_limit(url, service, monkeypatch):
    monkeypatch.setattr(front, "BODY_SECONDS", 0.2)
    with connected(url) as peer:
        peer.sendall(post(COMPLETIONS, BRIEF)[:-1])
        assert answer(peer)[0] == 408
    assert at_rest(service)


def test_far_too_long_texts_are_not_tokenised(url, service, monkeypatch):
    for path, body, field in [
        (COMPLETIONS, {"prompt": MIB[:900_000]}, "prompt"),
        (COMPLETIONS, {"prompt": ["w1", MIB[:900_000]]}, "prompt"),
        (CHATS, {"messages": [{"role": "user", "content": MIB[:300_000]}] * 3}, "messages"),
        ("/tokenize", {"prompt": MIB[:900_000]}, "prompt"),
    ]:

        def never(*_, **__):
            raise AssertionError("a text that is too long has been tokenised")

        monkeypatch.setattr(service.texts.tokenizer, "max_characters_per_token", 20)
        monkeypatch.setattr(Tokenizer, "encode", never)
        got = httpx.post(f"{url}{path}", json=body, timeout=60)
        error = got.json()["error"]
        assert got.status_code == 400, error
        assert "must be at most 1920, since max_model_len=96" in error["message"], path
        assert error["code"] == "context_length_exceeded", path
        assert error["param"] == field, path
        assert at_rest(service), path


def test_short_texts_do_not_wait_for_long_ones(url, service, monkeypatch):
    encode, going, go = prompts.encode, threading.Semaphore(0), threading.Event()

    def slow(params, prompt, **options):
        if len(prompt) > 2**14:
            going.release()
            assert go.wait(30)
            prompt = "w1"
        return encode(params, prompt, **options)

    monkeypatch.setattr(prompts, "encode", slow)
    with crowd(url, 3) as peers:
        for peer in peers:
            peer.sendall(post(COMPLETIONS, BRIEF | {"prompt": "w1 " * 2**14}))
        for _ in range(2):
            assert going.acquire(timeout=30)
        assert is_answered(url)
        go.set()
        assert {answer(peer)[0] for peer in peers} == {200}
    assert at_rest(service)


def test_one_request_cannot_fill_the_queue(url):
    """Of four slots and four places in the queue, one request may have half."""
    got = httpx.post(f"{url}{COMPLETIONS}", json=BRIEF | {"n": 5}, timeout=60)
    assert got.status_code == 400
    assert "asks for 5 completions: must be at most 4" in got.json()["error"]["message"]


def test_pages_of_other_origins_are_refused(url):
    """Even if their name resolves to this machine."""
    for headers, status in [
        ({"host": "localhost"}, 200),
        ({"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "BOX"}, 200),
        ({"host": "rebind.evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"host": "localhost", "origin": "http://rebind.evil.example"}, 403),
        ({"host": "localhost", "origin": "null"}, 403),
    ]:
        for request in (get("/", **headers), post(COMPLETIONS, BRIEF, **headers)):
            with connected(url) as peer:
                peer.sendall(request)
                got, body = answer(peer)
                assert got == status, body
                assert (b"foreign_host" in body) == (status == 403), headers


def test_names_of_a_server():
    assert own_names("0.0.0.0", "0.0.0.0", ()) is None
    assert own_names("127.0.0.1", "127.0.0.1", ["*"]) is None
    own = own_names("127.0.0.1", "localhost", ["My.Box"])
    assert own == {"localhost", "127.0.0.1", "::1", "my.box"}
    assert "evil" not in (own_names("0.0.0.0", "0.0.0.0", ["my.box"]) or ())


def test_shutdown_waits_for_no_client_forever():
    for inside, forced in [(0, False), (1, True)]:
        service = a_service(drain_seconds=0.1)
        server = Server(make_app(service), service)
        service.draining, service.inside = True, inside

        async def end(server=server):
            async with asyncio.timeout(5):
                await server._end_when_drained()

        asyncio.run(end())
        assert server.should_exit, inside
        assert server.force_exit == forced, inside
