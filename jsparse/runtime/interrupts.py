"""Delays interrupts during operations that must complete, and keeps interrupts from being lost."""

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
    """Delays Ctrl-C until an operation is complete."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *arguments: received.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if received and callable(before):
        before(*received[0])


def lose_no_interrupts() -> None:
    """Makes Ctrl-C end a command at any time; call it before jax is imported.

    Python drops an exception raised in a callback, such as jax's callback of the garbage collector,
    and an extension module may drop one during its import. A handler set by the user or the shell
    is kept.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
        sys.unraisablehook = partial(_raise_again, sys.unraisablehook)


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt, or exits during jax's import, when there is nothing to clean up."""
    while frame is not None and not hasattr(sys.modules.get("jax"), "jit"):
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(128 + number)
        frame = frame.f_back
    raise KeyboardInterrupt


def _raise_again(report: Any, lost: Any) -> None:
    """Interrupts the main thread again; reports other exceptions of callbacks."""
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        report(lost)
        return

    def interrupt() -> None:
        time.sleep(AGAIN_AFTER)
        os.kill(os.getpid(), signal.SIGINT)  # also ends a wait of the main thread

    # not threading.Thread: the interrupted code may hold its locks
    _thread.start_new_thread(interrupt, ())
