"""Attacks through connections: resources held without a key, or after a silent disconnect."""

import json
import socket
import time

import httpx
import pytest

from jsparse.server import connections, descriptors
from tests.support import patient
from tests.support.raw_http import answer, connected, crowd, get, post, told
from tests.support.serving_http import a_service, an_engine, at_rest, serving, soon

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "w1 w2", "max_tokens": 90, "temperature": 0, "ignore_eos": True}
BRIEF = LONG | {"max_tokens": 2}
BIG = 2**24


@pytest.fixture(scope="module")
def service():
    return a_service()


@pytest.fixture(scope="module")
def url(service, tmp_path_factory):
    page = tmp_path_factory.mktemp("page")
    (page / "big.js").write_bytes(bytes(BIG))
    with serving(service, an_engine(), page) as address:
        httpx.post(f"{address}{COMPLETIONS}", json=BRIEF, timeout=60)
        yield address


@pytest.fixture
def unhurried(service, monkeypatch):
    """The engine with slow steps, so that a hang-up comes in the middle."""
    engine = service.engine.engine
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: (time.sleep(0.02), step())[1])
    return engine


def send_forever(peer, data):
    while True:
        peer.sendall(data)


def hurry(monkeypatch, seconds=0.3):
    monkeypatch.setattr(connections, "SECONDS", seconds)


def test_head_has_a_size_limit(url):
    for lines in [
        [b"x: " + b"a" * connections.MAX_BYTES],
        [b"x%d: y" % nth for nth in range(20000)],
    ]:
        with connected(url) as peer:
            peer.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n")
            try:
                for at in range(0, len(lines), 1000):
                    peer.sendall(b"\r\n".join(lines[at : at + 1000]) + b"\r\n")
            except (ConnectionResetError, BrokenPipeError):  # before all was sent
                continue
            assert told(peer).startswith(b"HTTP/1.1 400"), lines


def test_trailers_have_a_size_limit(url, monkeypatch):
    hurry(monkeypatch)
    with connected(url) as peer:
        peer.sendall(b"POST /nothing HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        assert answer(peer)[0] == 404
        peer.sendall(b"0\r\n")
        with pytest.raises(OSError, match=r"reset|pipe"):
            send_forever(peer, b"x: y\r\n" * 2**10)


def test_non_http_bytes_are_refused(url, monkeypatch):
    for line in [b"GET / HTTP/1.1\r\nhost x\r\n\r\n", b"\x16\x03\x01\x02", b"GET"]:
        hurry(monkeypatch)
        with connected(url) as peer:
            peer.sendall(line)
            said = told(peer)
        if line == b"GET":  # it may become a request, and its time is over
            assert said == b"", line
            continue
        head, _, body = said.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400") and b"application/json" in head, line
        assert json.loads(body)["error"]["type"] == "invalid_request_error", line


@pytest.mark.parametrize(
    ("second", "stream"), [(get("/health"), False), (post(COMPLETIONS, LONG), True)]
)
def test_pipelined_bytes_do_not_hide_a_hang_up(url, service, unhurried, second, stream):
    """Six slots' worth of requests, each followed by one that is never served."""
    before = unhurried.counters.new_tokens
    with crowd(url, 6) as peers:
        for peer in peers:
            peer.sendall(post(COMPLETIONS, LONG | {"stream": stream}) + second)
        assert soon(lambda: len(service.live) == 6)
        for peer in peers[:3]:
            peer.sendall(second)
    assert at_rest(service)
    assert unhurried.counters.new_tokens - before < 3 * LONG["max_tokens"]


def test_request_sent_before_the_response_is_ignored(url, service, unhurried):
    """The response is complete, and the connection closes: the client may ask again."""
    for together in [True, False]:
        with connected(url) as peer:
            peer.sendall(post(COMPLETIONS, BRIEF) + get("/version") * together)
            if not together:
                assert soon(lambda: service.live), together
                peer.sendall(get("/version"))
            status, body = answer(peer)
            assert status == 200 and json.loads(body)["usage"]["completion_tokens"] == 2, together
            assert told(peer) == b"", together


def test_connection_without_a_request_is_closed(url, monkeypatch):
    for request_, status, rest in [
        (b"", None, b""),
        (b"", None, b"GET /health HTTP/1.1\r\nhost"),
        (get("/health"), 200, b""),
        (get("/health"), 200, b"G"),
        (post("/nothing", b"", length=50), 404, b""),
        (post("/nothing", b"", length=50), 404, b"x"),
    ]:
        hurry(monkeypatch)
        with connected(url) as peer:
            if request_:
                peer.sendall(request_)
                assert answer(peer)[0] == status, request_
            peer.sendall(rest)
            assert told(peer) == b"", request_


def test_longest_waiting_connection_makes_room(monkeypatch, caplog):
    monkeypatch.setattr(descriptors, "MAX_CONNECTIONS", 8)
    service, engine = a_service(), an_engine()
    step = engine.engine.step
    monkeypatch.setattr(engine.engine, "step", lambda: (time.sleep(0.02), step())[1])
    with serving(service, engine) as url:
        with connected(url) as busy:
            busy.sendall(post(COMPLETIONS, LONG))
            assert soon(lambda: service.live)
            with crowd(url, 20) as idle:
                assert patient.get(f"{url}/health").status_code == 200
                assert all(told(peer) == b"" for peer in idle[:10])
                idle[-1].sendall(get("/health"))
                assert answer(idle[-1])[0] == 200
            assert answer(busy)[0] == 200
        assert at_rest(service)
    assert "idle connections closed to make room for new ones: 1; at most 8 fit" in caplog.text


def test_peer_that_reads_nothing_is_dropped(url, service, monkeypatch):
    hurry(monkeypatch)
    with connected(url, receive=4096) as peer:
        peer.sendall(get("/big.js"))
        time.sleep(4 * connections.SECONDS)
        assert len(told(peer)) < BIG
    assert at_rest(service)


def test_stream_that_is_not_read_is_dropped(url, service, monkeypatch):
    """During generation: its memory is freed although the kernel buffers little of it."""
    hurry(monkeypatch)
    begin = connections.BoundedConnection.connection_made

    def with_little_room(self, transport):
        peer = transport.get_extra_info("socket")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        begin(self, transport)

    monkeypatch.setattr(connections.BoundedConnection, "connection_made", with_little_room)
    body = LONG | {"prompt": [[3]] * 4, "n": 2, "logprobs": 20, "stream": True}
    with connected(url, receive=4096) as peer:
        peer.sendall(post(COMPLETIONS, body))
        assert soon(lambda: service.live)
        assert at_rest(service)


def test_slow_peer_gets_the_whole_response(url, monkeypatch):
    hurry(monkeypatch)
    size = 0
    with connected(url, receive=4096) as peer:
        peer.sendall(get("/big.js"))
        while size <= BIG and (piece := peer.recv(2**18)):
            size += len(piece)
            if size >> 20 != (size - len(piece)) >> 20:
                time.sleep(0.05)
    assert size > BIG


# as the client of the JDK sends it with its first request
OFFER = {
    "connection": "Upgrade, HTTP2-Settings",
    "upgrade": "h2c",
    "http2-settings": "AAEAAEAAAAIAAAABAAMAAABk",
}


def in_chunks(body, size=10):
    """A chunked request that offers another protocol, in pieces as they may arrive."""
    head = post(COMPLETIONS, b"", **OFFER, **{"transfer-encoding": "chunked"})
    yield head.replace(b"content-length: 0\r\n", b"")
    for at in range(0, len(body), size):
        piece = body[at : at + size]
        yield b"%x\r\n%s\r\n" % (len(piece), piece)
    yield b"0\r\n\r\n"


def test_request_that_offers_an_upgrade_keeps_its_body(url):
    pieces = list(in_chunks(json.dumps(BRIEF).encode()))
    whole = [post(COMPLETIONS, BRIEF, **OFFER)], [post(COMPLETIONS, BRIEF)]
    with connected(url) as peer:
        for request in (*whole, *whole, pieces, [b"".join(pieces)], pieces):
            for piece in request:
                peer.sendall(piece)
            status, body = answer(peer)
            assert status == 200, body
            assert json.loads(body)["usage"]["completion_tokens"] == 2


def test_expected_body_of_an_offer_gets_100_continue(url):
    request = post(COMPLETIONS, BRIEF, **OFFER, expect="100-continue")
    head, _, body = request.partition(b"\r\n\r\n")
    with connected(url) as peer:
        peer.sendall(head + b"\r\n\r\n")
        expected = b"HTTP/1.1 100 Continue\r\n\r\n"
        assert peer.recv(len(expected)) == expected
        peer.sendall(body)
        assert answer(peer)[0] == 200


def test_pipelined_request_after_an_offer_is_ignored(url):
    with connected(url) as peer:
        peer.sendall(post(COMPLETIONS, BRIEF, **OFFER) + get("/version", **OFFER))
        assert answer(peer)[0] == 200
        assert peer.recv(1) == b""
