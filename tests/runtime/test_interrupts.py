"""Tests that an interrupt ends a command even where Python may lose its exception."""

import gc
import signal
import subprocess
import sys
import threading

import pytest

from jsparse.runtime.interrupts import lose_no_interrupts

pytestmark = pytest.mark.pure


@pytest.fixture(autouse=True)
def handlers(monkeypatch):
    """Restores the signal handlers that a test replaces."""
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def collect_and_wait():
    gc.collect()
    threading.Event().wait(60)


def test_interrupt_within_a_callback_is_raised_again():
    came = []

    def callback(phase, info):
        if phase == "stop" and not came:
            came.append(phase)
            signal.raise_signal(signal.SIGINT)

    gc.callbacks.append(callback)
    lose_no_interrupts()
    try:
        with pytest.raises(KeyboardInterrupt):
            collect_and_wait()
    finally:
        gc.callbacks.remove(callback)
    assert came == ["stop"]


def test_other_exceptions_of_callbacks_are_reported(monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: reported.append(lost.exc_type))
    lose_no_interrupts()

    class Fails:
        def __del__(self):
            raise ZeroDivisionError

    Fails()
    assert reported == [ZeroDivisionError]


def test_custom_handler_is_kept():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lose_no_interrupts()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_interrupt_within_an_import_ends_the_process(tmp_path):
    (tmp_path / "loses.py").write_text(
        "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\n"
        "except BaseException:\n    pass\n"
    )
    code = (
        "import sys; from jsparse.runtime.interrupts import lose_no_interrupts; "
        f"lose_no_interrupts(); sys.path.insert(0, {str(tmp_path)!r}); import loses; print('on')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (128 + signal.SIGINT, "", "")


def test_command_loses_no_interrupt_from_its_start():
    code = (
        "import signal, jsparse.__main__ as m, jsparse.cli.app as a; "
        "a.main = lambda: signal.raise_signal(signal.SIGINT); m.main()"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (128 + signal.SIGINT, "", "")
