"""Tests requests that offer another protocol: they are answered over HTTP/1.1."""

import json

import pytest

from tests.support.raw_http import answer, connected, get, post
from tests.support.serving_http import a_service, an_engine, serving

COMPLETIONS = "/v1/completions"
BODY = json.dumps({"prompt": "w1 w2", "max_tokens": 2, "temperature": 0}).encode()
# as the client of the JDK sends it with its first request
OFFER = {
    "connection": "Upgrade, HTTP2-Settings",
    "upgrade": "h2c",
    "http2-settings": "AAEAAEAAAAIAAAABAAMAAABk",
}


@pytest.fixture(scope="module")
def url():
    with serving(a_service(), an_engine()) as address:
        yield address


def chunked(body, size=10):
    """A request in chunks, in pieces as they may arrive."""
    whole = post(COMPLETIONS, b"", **OFFER, **{"transfer-encoding": "chunked"})
    yield whole.replace(b"content-length: 0\r\n", b"")
    for at in range(0, len(body), size):
        piece = body[at : at + size]
        yield b"%x\r\n%s\r\n" % (len(piece), piece)
    yield b"0\r\n\r\n"


def test_the_body_is_kept_on_one_connection(url):
    with connected(url) as peer:
        for request in (post(COMPLETIONS, BODY, **OFFER), post(COMPLETIONS, BODY)) * 2:
            peer.sendall(request)
            status, body = answer(peer)
            assert status == 200, body
            assert json.loads(body)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("together", [True, False])
def test_a_body_in_chunks_is_kept(url, together):
    with connected(url) as peer:
        for _ in range(2):
            pieces = list(chunked(BODY))
            for piece in [b"".join(pieces)] if together else pieces:
                peer.sendall(piece)
            status, body = answer(peer)
            assert status == 200, body


def test_a_body_that_is_waited_for_is_asked_for(url):
    request = post(COMPLETIONS, BODY, **OFFER, expect="100-continue")
    head, _, body = request.partition(b"\r\n\r\n")
    with connected(url) as peer:
        peer.sendall(head + b"\r\n\r\n")
        expected = b"HTTP/1.1 100 Continue\r\n\r\n"
        assert peer.recv(len(expected)) == expected
        peer.sendall(body)
        assert answer(peer)[0] == 200


def test_what_follows_the_request_is_not_taken(url):
    with connected(url) as peer:
        peer.sendall(post(COMPLETIONS, BODY, **OFFER) + get("/version", **OFFER))
        assert answer(peer)[0] == 200
        assert peer.recv(1) == b""
