"""Speaks HTTP by hand, like a malicious client."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


def connected(url: str, *, receive: int | None = None) -> socket.socket:
    """Returns a connection to a server; `receive` limits the kernel's receive buffer."""
    host, _, port = url.removeprefix("http://").partition(":")
    peer = socket.socket()
    if receive is not None:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    peer.settimeout(20)
    peer.connect((host, int(port)))
    return peer


@contextmanager
def crowd(url: str, count: int) -> Iterator[list[socket.socket]]:
    """Yields connections, and closes them at the end."""
    with ExitStack() as stack:
        yield [stack.enter_context(connected(url)) for _ in range(count)]


def get(path: str, **headers: str) -> bytes:
    """Returns a request without a body."""
    return "\r\n".join([f"GET {path} HTTP/1.1", *_lines(headers), "", ""]).encode()


def post(path: str, body: Any, length: int | None = None, **headers: str) -> bytes:
    """Returns a request with a JSON body and a Content-Length of `length` bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"content-type": "application/json", "content-length": f"{length or len(data)}"}
    head = "\r\n".join([f"POST {path} HTTP/1.1", *_lines(given | headers), "", ""])
    return head.encode() + data


def told(peer: socket.socket) -> bytes:
    """Returns all bytes that a server sends until it closes the connection."""
    pieces = []
    try:
        while piece := peer.recv(2**20):
            pieces.append(piece)
    except (ConnectionResetError, BrokenPipeError):
        pass
    return b"".join(pieces)


def answer(peer: socket.socket) -> tuple[int, bytes]:
    """Returns status and body of the next response with a Content-Length."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = peer.recv(4096)
        assert piece, data
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    (length,) = (
        int(line.split(b":")[1])
        for line in head.lower().split(b"\r\n")
        if line.startswith(b"content-length")
    )
    while len(body) < length:
        body += peer.recv(length - len(body))
    return int(head.split()[1]), body


def _lines(headers: dict[str, str]) -> list[str]:
    return [f"{name}: {value}" for name, value in ({"host": "localhost"} | headers).items()]
