"""Holds interrupts back while work must not be left half done, and keeps them from being lost."""

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

# seconds until an interrupt that a callback lost is raised again
AGAIN_AFTER = 0.01


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Holds Ctrl-C back until an operation is complete."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *arguments: came.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came and callable(before):
        before(*came[0])


def lose_no_interrupts() -> None:
    """Makes Ctrl-C end a command at any time; to be called before jax is imported.

    Python drops the exception of a callback, such as jax's of the garbage collector, and an
    extension module may drop one while it is imported. A user's or shell's own handler stays.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
        sys.unraisablehook = partial(_raise_again, sys.unraisablehook)


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt, or exits while jax is imported: nothing is to be cleaned up."""
    while frame is not None and not hasattr(sys.modules.get("jax"), "jit"):
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(128 + number)
        frame = frame.f_back
    raise KeyboardInterrupt


def _raise_again(report: Any, lost: Any) -> None:
    """Interrupts the main thread again, or reports another exception of a callback."""
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        report(lost)
        return

    def interrupt() -> None:
        time.sleep(AGAIN_AFTER)
        os.kill(os.getpid(), signal.SIGINT)  # which also ends a wait of the main thread

    # not threading.Thread, whose locks the interrupted code may hold
    _thread.start_new_thread(interrupt, ())
