"""Connects a process to another one, and ends it if the other is lost.

Both processes read continuously, and send a heartbeat every few seconds. If one ends or hangs, the
other ends within seconds, even if its other threads are blocked.
"""

import json
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NoReturn

import numpy as np

# seconds until a lost host is noticed
NOTICED = 8
# seconds between two heartbeats, and without any until a process counts as hung
BEAT, SILENT = 2.0, 16.0
_ENDED = "{} has ended; this process cannot continue without it"
_HUNG = "{} has sent nothing for {:g} seconds; this process cannot continue without it"
_HEAD = struct.Struct("!II")
# run before this process ends because another is lost; each takes a few seconds at most
farewells: list[Callable[[], None]] = []
_ending = threading.Lock()


class Peer:
    """A connection to another process, `name`; messages consist of a value and arrays."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        for option, value in (("KEEPIDLE", 2), ("KEEPINTVL", 2), ("KEEPCNT", 3)):
            if hasattr(socket, f"TCP_{option}"):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{option}"), value)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # applies while data is unacknowledged
            milliseconds = 1000 * NOTICED
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        silent = struct.pack("ll", int(SILENT), int(SILENT % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, silent)
        self.name, self.messages = name, SimpleQueue[tuple[Any, list[np.ndarray]]]()
        self.connection, self._sending, self.ended = connection, threading.Lock(), False
        self._done = threading.Event()
        for work in (self._read, self._beat):
            threading.Thread(target=work, name=f"jsparse-{name}", daemon=True).start()

    def send(self, value: Any, arrays: Sequence[np.ndarray] = (), *, last: bool = False) -> None:
        """Sends a JSON value and arrays; nothing can be sent after the `last` message."""
        arrays = [np.asarray(array, order="C") for array in arrays]
        shapes = [(array.dtype.str, array.shape) for array in arrays]
        head, body = json.dumps([value, shapes]).encode(), b"".join(x.tobytes() for x in arrays)
        with suppress(OSError), self._sending:  # the reader thread detects a closed connection
            self.connection.sendall(_HEAD.pack(len(head), len(body)) + head + body)
            if last:
                self._done.set()
                self.connection.shutdown(socket.SHUT_WR)

    def receive(self, *, to_the_end: bool = False) -> tuple[Any, list[np.ndarray]]:
        """Waits for the next message.

        Raises:
            SystemExit: the other process has ended, which is expected only with `to_the_end`.
        """
        value, arrays = self.messages.get()
        if "end" in value and not to_the_end:
            print(f"jsparse: {_ENDED.format(self.name)}", file=sys.stderr, flush=True)
            raise SystemExit(1)
        return value, arrays

    def _beat(self) -> None:
        """Sends heartbeats until the last message has been sent."""
        while not self._done.wait(BEAT):
            self.send({"beat": True})

    def _read(self) -> None:
        why = _ENDED.format(self.name)
        try:
            with self.connection:
                while sizes := _received(self.connection, _HEAD.size):
                    head, body = (_received(self.connection, n) for n in _HEAD.unpack(sizes))
                    value, shapes = json.loads(head)
                    if "failed" in value:
                        return lost(f"{self.name} has failed: {value['failed']}")
                    self.ended = self.ended or "end" in value
                    if "beat" not in value:
                        self.messages.put((value, _arrays(shapes, body)))
        except BlockingIOError:  # SO_RCVTIMEO; silence is expected after an "end" message
            why = _HUNG.format(self.name, SILENT)
        except TimeoutError:  # TCP's: the host is lost, or the process does not read
            why = _HUNG.format(self.name, NOTICED)
        except OSError:  # reset, for instance if it ended before it read the last heartbeat
            pass
        except (ValueError, struct.error):  # a truncated or foreign message
            self.ended = False
        finally:
            self._done.set()
        if not self.ended:
            lost(why)


def _received(connection: socket.socket, size: int) -> bytearray:
    """Returns `size` bytes, or fewer at the end; BlockingIOError after SILENT seconds."""
    data, at = bytearray(size), 0
    with memoryview(data) as view:
        while at < size and (count := connection.recv_into(view[at:])):
            at += count
    del data[at:]
    return data


def _arrays(shapes: Sequence[tuple[str, Sequence[int]]], body: bytearray) -> list[np.ndarray]:
    arrays, at = [], 0
    for kind, shape in shapes:
        array = np.frombuffer(body, kind, int(np.prod(shape)), at).reshape(shape)
        at += array.nbytes
        arrays.append(array)
    return arrays


def lost(why: str) -> NoReturn:
    """Ends this process after its farewells, even if other threads are blocked."""
    with _ending:  # never released, so that only the first reason is printed
        print(f"jsparse: {why}", file=sys.stderr, flush=True)
        for farewell in farewells:
            with suppress(Exception):
                farewell()
        os._exit(1)
