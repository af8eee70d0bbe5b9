"""Tests the page in a browser, against a server controlled by the test.

With JSPARSE_SCREENSHOTS=docs/images/server it takes the screenshots of the docs again.
"""

import http.server
import json
import math
import os
import queue
import threading
import time
from pathlib import Path

import pytest

from tests.support.browser import Browser, needs_chromium

pytestmark = needs_chromium
PAGE = Path(__file__).parents[2] / "jsparse" / "server" / "page"
SHOTS = os.environ.get("JSPARSE_SCREENSHOTS")
TYPES = {
    ".html": "text/html",
    ".svg": "image/svg+xml",
    ".css": "text/css",
    ".js": "text/javascript",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SHIFT = 8


def live(rate=41.5, bound=18.2, layers=30, requests=3):
    shares = [
        0.06 + 0.9 * math.exp(-layer / 2) + 0.04 * (layer % 5 == 3) for layer in range(layers)
    ]
    phases = ["decoding", "reading", "waiting"]
    return {
        "running": 2,
        "waiting": 1,
        "kv_cache_usage": 0.437,
        "prefix_cache_hits": 6144,
        "prefix_cache_queries": 8192,
        "tokens_per_second": rate,
        "dense_bound_tokens_per_second": bound,
        "attended_by_layer": shares if layers else None,
        "requests": [
            {
                "id": f"chatcmpl-5f0c41d7e2{nth:02}",
                "phase": phases[nth % 3],
                "prompt_tokens": 31072 >> nth,
                "tokens": 0 if nth % 3 else 212,
            }
            for nth in range(requests)
        ],
    }


class Server(http.server.BaseHTTPRequestHandler):
    """Serves the page, one model, and the pieces and live states that the test puts into queues.

    A piece is a text, a pair of status and error message, a dictionary that is sent as an event,
    "END" or "HANG UP".
    """

    def log_message(self, format, *args):
        pass

    def do_GET(self):
        if not self.path.startswith(("/v1", "/live")):
            return self.reply_file(PAGE / (self.path.strip("/") or "index.html"))
        if not self.allowed():
            return self.reply(401, {"error": {"message": "Unauthorized"}})
        if self.path == "/v1/models":
            return self.reply(200, {"data": [self.server.model]})
        self.begin()
        self.server.listeners += 1
        while (state := self.server.states.get()) is not None:
            self.event(state)
        self.close_connection = True

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, body))
        if not self.allowed():
            return self.reply(401, {"error": {"message": "Unauthorized"}})
        first = self.server.pieces.get()
        if isinstance(first, tuple):
            return self.reply(first[0], {"error": {"message": first[1]}})
        self.begin()
        piece = first
        try:
            while piece not in ("END", "HANG UP"):
                chat = "chat" in self.path
                choice = {"delta": {"content": piece}} if chat else {"text": piece}
                self.event(piece if isinstance(piece, dict) else {"choices": [choice]})
                piece = self.server.pieces.get()
            if piece == "END":
                self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.server.gone.set()
        self.close_connection = True

    def allowed(self):
        key = self.server.key
        return key is None or self.headers.get("Authorization") == f"Bearer {key}"

    def begin(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()

    def event(self, data):
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())

    def reply_file(self, file):
        if not file.is_file():
            return self.reply(404, {"error": {"message": "none"}})
        self.reply(200, file.read_bytes(), TYPES[file.suffix])

    def reply(self, status, body, kind="application/json"):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def server():
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    made.daemon_threads = True
    made.states, made.pieces, made.gone = queue.Queue(), queue.Queue(), threading.Event()
    made.seen, made.key, made.listeners = [], None, 0
    made.model = {
        "id": "SmolLM2-135M",
        "policy": "quest(budget=1024, slack=0.5)",
        "policy_short": "quest(budget=1024)",
        "chat_template": True,
    }
    made.url = f"http://127.0.0.1:{made.server_port}/"
    made.handle_error = lambda *_: None  # readers that hang up
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.states.put(None)
    made.pieces.put("HANG UP")
    made.shutdown()
    thread.join()
    made.socket.close()


@pytest.fixture(scope="module")
def chromium():
    made = Browser()
    yield made
    made.close()


@pytest.fixture
def page(chromium, server):
    """The page, open, with a first live state."""
    chromium.look(1280, 800)
    chromium.call("Network.clearBrowserCache")
    chromium.requests.clear()
    chromium.errors.clear()
    server.states.put(live())
    chromium.open(server.url)
    chromium.run("sessionStorage.clear()")
    chromium.until("document.getElementById('model').textContent === 'SmolLM2-135M'")
    yield chromium
    chromium.call("Page.navigate", url="about:blank")


def say(page, text):
    page.run("document.getElementById('text').focus()")
    page.type(text)
    page.press("Enter")


def answer_is(page, text):
    page.until(
        "[...document.querySelectorAll('article.assistant p')].at(-1)?.textContent === "
        + json.dumps(text)
    )


def quiet(page, server):
    """Checks that no error was logged and that no other host was contacted."""
    page.run("1")
    assert page.errors == []
    others = [url for url in page.requests if not url.startswith(server.url)]
    assert others == []
    assert any(url.endswith("page.js") for url in page.requests)


def test_response_streams_and_the_chat_continues_by_keyboard(page, server):
    assert page.run("document.activeElement.id") == "text"
    page.type("Who was")
    page.press("Enter", SHIFT)
    page.type("Turing?")
    assert page.run("document.getElementById('text').value") == "Who was\nTuring?"
    assert server.seen == []
    page.press("Enter")
    server.pieces.put("A <b>mathema")
    answer_is(page, "A <b>mathema")  # before the response is complete, and as text
    assert page.run("document.querySelector('article.assistant').ariaBusy") == "true"
    assert page.run("document.getElementById('send').hidden")
    server.pieces.put("tician.")
    answer_is(page, "A <b>mathematician.")
    server.pieces.put({"choices": [{"delta": {}, "finish_reason": "length"}]})
    server.pieces.put("END")
    page.until("!document.getElementById('send').hidden")
    assert "Cut at the most new tokens" in page.text("article.assistant .note")
    say(page, "When?")
    server.pieces.put("1912")
    server.pieces.put("END")
    answer_is(page, "1912")
    path, body = server.seen[1]
    assert path == "/v1/chat/completions"
    assert [(each["role"], each["content"]) for each in body["messages"]] == [
        ("user", "Who was\nTuring?"),
        ("assistant", "A <b>mathematician."),
        ("user", "When?"),
    ]
    assert (body["stream"], body["max_tokens"], body["model"]) == (True, 512, "SmolLM2-135M")
    assert "temperature" not in body
    quiet(page, server)


def test_stop_ends_the_request_and_keeps_the_partial_text(page, server):
    say(page, "Count")
    server.pieces.put("1 2 3")
    answer_is(page, "1 2 3")
    page.run("document.getElementById('stop').focus()")
    page.press("Enter")
    page.until("document.querySelector('article .note')?.textContent === 'Stopped.'")
    assert page.run("document.activeElement.id") == "text"
    for _ in range(200):  # the server notices when it writes
        server.pieces.put("4")
        if server.gone.wait(0.02):
            break
    assert server.gone.is_set()
    while not server.pieces.empty():
        server.pieces.get_nowait()
    say(page, "Go on")
    server.pieces.put("4")
    server.pieces.put("END")
    answer_is(page, "4")
    assert server.seen[1][1]["messages"][1]["content"] == "1 2 3"
    quiet(page, server)


def test_errors_are_shown_and_the_question_is_restored(page, server):
    say(page, "Much too long")
    server.pieces.put((400, "prompt of 9000 tokens: at most 2048"))
    page.until("!document.getElementById('problem').hidden")
    assert page.text("#problem") == "prompt of 9000 tokens: at most 2048"
    assert page.run("document.getElementById('text').value") == "Much too long"
    assert page.run("document.querySelectorAll('article').length") == 0
    page.press("Enter")
    server.pieces.put("so")
    answer_is(page, "so")
    assert [each["role"] for each in server.seen[1][1]["messages"]] == ["user"]
    server.pieces.put({"error": {"message": "the engine failed"}})
    page.until("document.getElementById('problem').textContent === 'the engine failed'")
    server.pieces.put("HANG UP")
    say(page, "And?")
    server.pieces.put("half")
    server.pieces.put("HANG UP")
    page.until("document.getElementById('problem').textContent.includes('connection was lost')")
    answer_is(page, "half")


def test_live_figures_change(page, server):
    page.until("!document.getElementById('live').hidden")
    assert page.text("#policy") == "quest(budget=1024)"
    assert (page.text("#rate"), page.text("#bound")) == ("41.5", "18.2")
    assert (page.text("#cache"), page.text("#prefix")) == ("44 %", "75 %")
    assert page.run("document.querySelectorAll('#layers i').length") == 30
    row = "document.querySelector('tbody tr').innerText"
    assert page.run(row) == "41d7e200\tdecoding\t31,072\t212"
    server.states.put(live(rate=1234.5, bound=None, layers=0, requests=11))
    page.until("document.getElementById('rate').textContent === '1,235'")
    bars = "['dense', 'rate-bar', 'bound-bar'].map(i => document.getElementById(i).offsetWidth)"
    assert page.run(bars) == [0, 0, 0], "there is nothing to compare with"
    assert page.run("document.getElementById('layers').hidden")
    assert page.run("document.querySelectorAll('tbody tr').length") == 8
    assert page.text("#more-requests") == "and 3 more"
    server.states.put(live(layers=12))
    page.until("document.querySelectorAll('#layers i').length === 12")
    assert page.text("#attended-mean").endswith("% on average")
    assert 0 not in page.run(bars)
    quiet(page, server)


def test_lost_connection_is_shown_and_restored(page, server):
    page.until("!document.getElementById('live').hidden")
    server.states.put(None)
    page.until("document.getElementById('live').hidden")
    assert page.text("#connection") == "The connection to the server was lost. Trying again in 1 s."
    server.states.put(live(rate=7.0))
    page.until("document.getElementById('rate').textContent === '7'")
    assert page.text("#connection") == ""
    assert server.listeners == 2


def test_key_is_requested_and_used(chromium, server):
    server.key = "secret"
    chromium.look(1280, 800)
    chromium.open(server.url)
    chromium.run("sessionStorage.clear()")
    chromium.until("document.getElementById('connection').textContent.includes('wants an API key')")
    say(chromium, "Hi")
    chromium.until("document.getElementById('problem').textContent.includes('wants an API key')")
    chromium.run("document.getElementById('settings').open = true")
    chromium.run("document.getElementById('key').focus()")
    chromium.type("secret")
    chromium.press("Tab")
    server.states.put(live())
    chromium.until("document.getElementById('rate').textContent === '41.5'")
    say(chromium, "")
    server.pieces.put("Hello")
    answer_is(chromium, "Hello")
    server.pieces.put("END")
    chromium.until("!document.getElementById('send').hidden")
    chromium.run("sessionStorage.clear()")
    chromium.call("Page.navigate", url="about:blank")


QUESTION = "Summarise the three letters above. Which of them mentions the harvest?"
ANSWER = """The first letter, of March 1851, reports the loss of the mill and asks for a loan.
The second declines it, and offers instead to buy the lower meadow.
The third accepts, and closes with news of the family.

Only the second mentions the harvest: it was late, and half of the barley was lost to rain."""
LONG_WORD = "https://example.org/" + "a" * 300


@pytest.mark.parametrize(
    ("scheme", "device", "size"), [("light", "desktop", (1280, 800)), ("dark", "phone", (390, 844))]
)
def test_appearance(page, server, scheme, device, size):
    page.look(*size, scheme)
    page.until("!document.getElementById('live').hidden")
    say(page, QUESTION)
    server.pieces.put(ANSWER)
    answer_is(page, ANSWER)
    if SHOTS:
        Path(SHOTS).mkdir(parents=True, exist_ok=True)
        time.sleep(0.3)
        page.shoot(Path(SHOTS, f"{device}_{scheme}.png"), whole=device == "phone")
    server.pieces.put(LONG_WORD)
    answer_is(page, ANSWER + LONG_WORD)
    server.pieces.put("END")
    page.run("document.getElementById('settings').open = true")
    root = "document.documentElement"
    assert page.run(f"{root}.scrollWidth <= {root}.clientWidth")
    assert page.run(f"{root}.clientWidth") <= size[0]
    red = page.run("parseInt(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])")
    assert (red > 200) == (scheme == "light")
    beside = page.run(
        "document.querySelector('aside').getBoundingClientRect().left > "
        "document.getElementById('chat').getBoundingClientRect().left"
    )
    assert beside == (device == "desktop")
    quiet(page, server)
