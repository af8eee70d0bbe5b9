"""Drives Chromium through its DevTools protocol."""

import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiers import BROWSERS

try:
    from websockets.sync.client import connect
except ModuleNotFoundError:
    connect = None

CHROMIUM = next((found for name in BROWSERS if (found := shutil.which(name))), None)
needs_chromium = [
    pytest.mark.browser,
    pytest.mark.skipif(not (CHROMIUM and connect), reason="needs Chromium and websockets"),
]
PATIENCE = 20.0
KEYS = {"Enter": 13, "Tab": 9, "Escape": 27}


class Browser:
    """A headless Chromium with one tab.

    Attributes:
        requests: the addresses that the tab has requested.
        errors: error messages of its console, and uncaught exceptions.
    """

    def __init__(self):
        assert connect is not None
        self.requests: list[str] = []
        self.errors: list[str] = []
        with contextlib.ExitStack() as opened:
            self._folder = opened.enter_context(
                tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            )
            self._process = subprocess.Popen(
                [
                    str(CHROMIUM),
                    "--headless=new",
                    "--no-sandbox",  # it is unavailable if tests run as root
                    "--disable-gpu",
                    "--disable-dev-shm-usage",
                    "--no-first-run",
                    "--remote-debugging-port=0",
                    f"--user-data-dir={self._folder}",
                    "about:blank",
                ],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            opened.callback(self._process.wait, PATIENCE)
            opened.callback(self._process.terminate)
            self._socket = opened.enter_context(connect(self._tab(), max_size=None))
            self._sent = 0
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.call(f"{domain}.enable")
            self.close = opened.pop_all().close

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol; records events that arrive before its result."""
        self._sent += 1
        self._socket.send(json.dumps({"id": self._sent, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(PATIENCE))
            if message.get("id") == self._sent:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self._note(message)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """Returns the value of a JavaScript expression."""
        made = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in made, made["exceptionDetails"]
        return made["result"].get("value")

    def until(self, script: str) -> None:
        """Waits until a JavaScript expression is true."""
        end = time.monotonic() + PATIENCE
        while not self.run(script):
            assert time.monotonic() < end, f"never true: {script}\n{self.errors}"
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        """Presses a key; modifier 8 is Shift."""
        given: dict[str, Any] = {"key": key, "code": key, "modifiers": modifiers}
        given["windowsVirtualKeyCode"] = KEYS[key]
        if key == "Enter":
            given["text"] = "\r"
        self.call("Input.dispatchKeyEvent", type="keyDown", **given)
        self.call("Input.dispatchKeyEvent", type="keyUp", **given)

    def look(self, width: int, height: int, scheme: str = "light") -> None:
        """Sets the size of the window and the preferred colours."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def shoot(self, file: Path, *, whole: bool = False) -> None:
        made = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(made["data"]))

    def _tab(self) -> str:
        """Returns the address of the tab's end of the protocol, once it exists."""
        port, end = self._wait_for_port(), time.monotonic() + PATIENCE
        while True:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as response:
                tabs = [each for each in json.load(response) if each["type"] == "page"]
            if tabs:
                return tabs[0]["webSocketDebuggerUrl"]
            assert time.monotonic() < end, "Chromium opens no tab"
            time.sleep(0.02)

    def _wait_for_port(self) -> int:
        file, end = Path(self._folder, "DevToolsActivePort"), time.monotonic() + PATIENCE
        while not (file.exists() and file.read_text().count("\n")):
            assert self._process.poll() is None, "Chromium ended at once"
            assert time.monotonic() < end, "Chromium does not start"
            time.sleep(0.02)
        return int(file.read_text().split("\n")[0])

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message["method"] == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif message["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif message["method"] == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(str([each.get("value") for each in params["args"]]))
        elif message["method"] == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
