"""Tests the client that measures servers: its figures, its timeline, its errors, its command.

Timelines run in virtual time: the event loop's clock jumps to the next event, and a scripted server
sleeps in it. What sockets do is tested against a server on a thread.
"""

import asyncio
import http.server
import json
import math
import socket
import sys
import threading

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from jsparse.benchmark import serve
from jsparse.benchmark.latency import DETAILS, figures
from jsparse.benchmark.questions import (
    prefix_questions,
    questions_of,
    random_questions,
    tokenizer_of,
    words_below,
    words_of,
)
from jsparse.benchmark.serve import Answer, Question, ask, body_of, drive
from jsparse.benchmark.workload import arrivals
from jsparse.cli.app import app

COMPLETIONS, CHAT = serve.ENDPOINTS
BODY = body_of(Question("hi", 3), COMPLETIONS, "tiny", ignore_eos=True, options={})
DONE = "[DONE]"


class VirtualTime(asyncio.SelectorEventLoop):
    """An event loop that does not wait: its clock jumps to when the next thing is due."""

    def __init__(self):
        super().__init__()
        self.now, wait = 0.0, self._selector.select

        def select(timeout):
            self.now += timeout or 0.0
            return wait(0)

        self._selector.select = select

    def time(self):
        return self.now


def in_virtual_time(task):
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(task)


class Script(httpx.AsyncByteStream):
    """Sends each event after a pause in seconds; raises those that are errors."""

    def __init__(self, events):
        self.events = events

    async def __aiter__(self):
        for pause, event in self.events:
            await asyncio.sleep(pause)
            if isinstance(event, Exception):
                raise event
            data = event if isinstance(event, str) else json.dumps(event)
            yield f"data: {data}\n\n".encode()


def scripted(*scripts, status=200):
    """A client whose requests get these scripts, the last of them again and again."""
    left = list(scripts)

    def handle(request):
        events = left.pop(0) if len(left) > 1 else left[0]
        return httpx.Response(status, stream=Script(events))

    return httpx.AsyncClient(
        transport=httpx.MockTransport(handle), base_url="http://server", timeout=None
    )


def piece(text, finish=None):
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def usage(prompt, new):
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": new}}


def answered(*pieces, prompt=4, new=None):
    """A script: pieces at these pauses, then the usage."""
    events = [(pause, piece("x")) for pause in pieces]
    return [*events, (0, usage(prompt, new or len(pieces))), (0, DONE)]


def done(sent, *times, new=None, prompt=10, due=None, ended=None):
    return Answer(
        due=sent if due is None else due,
        sent=sent,
        times=list(times),
        ended=times[-1] if ended is None else ended,
        prompt_tokens=prompt,
        output_tokens=len(times) if new is None else new,
        text="x" * len(times),
    )


def test_figures_of_given_times():
    answers = [
        done(1.0, 1.5, 1.75, 2.0, 2.25),
        done(2.0, 4.0, 5.0, new=9, prompt=30),
        Answer(due=2.5, sent=2.5, ended=11.0, error="HTTP 500: broken"),
        done(3.0, 3.25, new=1, prompt=2),
    ]
    made = figures(answers, percentiles=(50, 99.9), goodput={"ttft": 500, "tpot": 250})
    assert made["duration"] == 10.0
    assert (made["completed"], made["failed"]) == (3, 1)
    assert (made["total_input_tokens"], made["total_output_tokens"]) == (42, 14)
    assert made["request_throughput"] == 0.3
    assert made["output_throughput"] == 1.4
    assert made["total_token_throughput"] == 5.6
    # of 500, 2000 and 250 ms
    assert made["mean_ttft_ms"] == pytest.approx(2750 / 3)
    assert made["median_ttft_ms"] == made["p50_ttft_ms"] == 500
    assert made["std_ttft_ms"] == pytest.approx(np.std([500, 2000, 250]))
    assert made["p99.9_ttft_ms"] == pytest.approx(500 + 0.998 * 1500)
    # 0.75 s for 3 tokens behind the first, 1 s for 8; the answer of one token has none
    assert made["mean_tpot_ms"] == pytest.approx((250 + 125) / 2)
    assert made["median_itl_ms"] == 250
    assert made["mean_itl_ms"] == pytest.approx((3 * 250 + 1000) / 4)
    assert made["mean_e2el_ms"] == pytest.approx((1250 + 3000 + 250) / 3)
    # the second waits too long for its first token; the last has no token behind it
    assert made["request_goodput"] == 0.2
    # half of the nine tokens of the second answer come 3 s after the first was sent
    assert made["max_output_tokens_per_s"] == 4.5
    assert made["max_concurrent_requests"] == 2
    assert made["errors"] == ["", "", "HTTP 500: broken", ""]
    assert made["output_lens"] == [4, 9, 0, 1]
    assert made["ttfts"] == [0.5, 2.0, 0.0, 0.25]
    assert made["itls"] == [[0.25] * 3, [1.0], [], []]
    assert made["start_times"] == [0.0, 1.0, 1.5, 2.0]
    assert set(DETAILS) <= set(made)


def test_one_that_ends_makes_room_for_one_sent_just_then():
    assert figures([done(0.0, 1.0), done(1.0, 2.0)])["max_concurrent_requests"] == 1
    assert figures([done(0.0, 1.0), done(0.9, 2.0)])["max_concurrent_requests"] == 2


def test_of_nothing_complete_there_is_no_figure():
    made = figures([Answer(error="x", ended=2.0)], goodput={"ttft": 1}, queued=True)
    assert (made["completed"], made["failed"]) == (0, 1)
    assert made["request_throughput"] == made["request_goodput"] == 0
    assert made["mean_ttft_ms"] is None
    assert made["p99_client_queue_time_ms"] is None
    json.dumps(made, allow_nan=False)


def test_a_stream_is_timed_piece_by_piece():
    script = [
        (0.5, piece("a")),
        (0.25, piece("")),  # a token whose text is held back
        (0.25, piece("bc")),
        (0.125, piece("", "length")),
        (1, usage(7, 5)),
        (1, DONE),
    ]
    answer = in_virtual_time(ask(scripted(script), COMPLETIONS, BODY))
    assert answer.error == ""
    assert answer.times == [0.5, 0.75, 1.0]
    assert answer.ended == 1.125
    assert (answer.text, answer.prompt_tokens, answer.output_tokens) == ("abc", 7, 5)


def test_the_last_piece_may_say_why_it_ended():
    script = [(1, piece("a")), (1, piece("b", "length")), (0, usage(7, 2)), (0, DONE)]
    answer = in_virtual_time(ask(scripted(script), COMPLETIONS, BODY))
    assert (answer.times, answer.ended) == ([1.0, 2.0], 2.0)


def test_a_chat_is_timed_from_its_first_content():
    def delta(finish=None, **given):
        return {"choices": [{"index": 0, "delta": given, "finish_reason": finish}]}

    script = [
        (0.5, delta(role="assistant", content="")),
        (0.5, delta(content="a")),
        (0.5, delta(content="b")),
        (0.5, delta("stop") | usage(3, 2) | {"choices": delta("stop")["choices"]}),
        (0, DONE),
    ]
    answer = in_virtual_time(ask(scripted(script), CHAT, BODY))
    assert (answer.times, answer.ended, answer.text) == ([1.0, 1.5], 2.0, "ab")
    # an answer whose only token has no text
    script = [(1, delta(role="assistant")), (1, delta("stop")), (0, usage(3, 1)), (0, DONE)]
    assert in_virtual_time(ask(scripted(script), CHAT, BODY)).times == [2.0]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([(1, piece("a")), (0, usage(1, 1))], "the stream ended without [DONE]"),
        ([(1, piece("a")), (0, DONE)], "the stream has no usage"),
        ([(1, usage(1, 0)), (0, DONE)], "the answer is empty"),
        ([(1, piece("a")), (0, {"error": {"message": "boom"}})], "while streaming: boom"),
        ([(1, piece("a")), (0, {"error": "bust"})], "while streaming: bust"),
        ([(1, "{nonsense")], "no JSON object: {nonsense"),
        ([(1, "[1]")], "no JSON object: [1]"),
        ([(1, piece("a")), (0, httpx.ReadError(""))], "ReadError"),
        ([(1, httpx.ReadTimeout("slow"))], "ReadTimeout: slow"),
    ],
)
def test_what_goes_wrong_is_an_error_of_its_request(script, message):
    answer = in_virtual_time(ask(scripted(script), COMPLETIONS, BODY))
    assert message in answer.error
    assert answer.ended == 1.0
    assert figures([answer])["failed"] == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "too long"}}, "HTTP 400: too long"),
        ({"object": "error", "message": "too long"}, "HTTP 400: too long"),
        ({"detail": "no"}, "HTTP 400: {'detail': 'no'}"),
        ("busy", "HTTP 400: busy"),
        ("", "HTTP 400"),
    ],
)
def test_refusals_are_quoted(body, message):
    content = body if isinstance(body, str) else json.dumps(body)
    transport = httpx.MockTransport(lambda request: httpx.Response(400, text=content))
    server = httpx.AsyncClient(transport=transport, base_url="http://server")
    assert in_virtual_time(ask(server, COMPLETIONS, BODY)).error == message


def test_requests_are_sent_when_they_are_due():
    server = scripted(answered(1.0, 0.5), answered(0.25), answered(2.0))
    answers = in_virtual_time(drive(server, COMPLETIONS, [BODY] * 3, [0.0, 0.5, 3.0]))
    assert [answer.sent for answer in answers] == [0.0, 0.5, 3.0]
    assert [answer.times for answer in answers] == [[1.0, 1.5], [0.75], [5.0]]
    made = figures(answers)
    assert made["duration"] == 5.0
    assert made["max_concurrent_requests"] == 2


def test_concurrency_is_bounded_and_what_waits_is_not_timed_but_told():
    seen = []
    answers = in_virtual_time(
        drive(
            scripted(answered(1.0)),
            COMPLETIONS,
            [BODY] * 4,
            [0.0, 0.0, 0.0, 0.5],
            max_concurrency=2,
            on_answer=seen.append,
        )
    )
    assert [answer.sent for answer in answers] == [0.0, 0.0, 1.0, 1.0]
    assert len(seen) == 4
    made = figures(answers, queued=True)
    assert made["max_concurrent_requests"] == 2
    assert made["mean_ttft_ms"] == 1000
    assert made["mean_client_queue_time_ms"] == pytest.approx(1e3 * (1.0 + 0.5) / 4)


def test_a_body_has_what_was_asked_for():
    assert BODY == {
        "model": "tiny",
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "prompt": "hi",
        "ignore_eos": True,
    }
    chat = body_of(Question("hi", 3), CHAT, "m", ignore_eos=False, options={"temperature": 0.5})
    assert chat["messages"] == [{"role": "user", "content": "hi"}]
    assert chat["temperature"] == 0.5
    assert "prompt" not in chat and "ignore_eos" not in chat


@pytest.mark.parametrize(("burstiness", "spread"), [(1.0, 1.0), (0.25, 2.0), (16.0, 0.25)])
def test_arrivals_are_gamma(burstiness, spread):
    times = arrivals(np.random.default_rng(0), 20000, 50.0, burstiness)
    gaps = np.diff(times)
    assert np.mean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(spread, rel=0.05)
    assert arrivals(np.random.default_rng(0), 3, math.inf, burstiness) == [0.0] * 3


def test_random_prompts_vary_within_their_range():
    rng, words = np.random.default_rng(0), words_below(50)
    made = random_questions(
        rng, words, count=400, input_len=10, output_len=4, range_ratio=0.5, prefix_len=3
    )
    assert len({tuple(each.prompt[:3]) for each in made}) == 1
    assert {len(each.prompt) - 3 for each in made} == set(range(5, 16))
    assert {each.tokens for each in made} == {2, 3, 4, 5, 6}
    assert max(max(each.prompt) for each in made) == 49
    fixed = random_questions(
        rng, words, count=9, input_len=10, output_len=4, range_ratio=0.0, prefix_len=0
    )
    assert {(len(each.prompt), each.tokens) for each in fixed} == {(10, 4)}


def test_prefixes_are_shared_alike():
    made = prefix_questions(
        np.random.default_rng(0),
        words_below(1000),
        count=12,
        num_prefixes=3,
        prefix_len=8,
        suffix_len=2,
        output_len=5,
    )
    begins = [tuple(each.prompt[:8]) for each in made]
    assert sorted(begins.count(each) for each in set(begins)) == [4, 4, 4]
    assert begins != sorted(begins, key=begins.index)  # not in blocks
    assert len({tuple(each.prompt[8:]) for each in made}) == 12


def test_a_tokenizer_draws_text_alone():
    tokenizer = tokenizer_of("smollm2")
    drawn = words_of(tokenizer)(np.random.default_rng(0), 20000)
    assert not set(drawn) & set(tokenizer.control_token_ids())
    assert len(set(drawn)) > 10000


def test_prompts_of_a_file(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": "b", "output_tokens": 7, "more": 1}\n')
    assert questions_of(file, None, 5) == [Question("a", 5), Question("b", 7)]
    assert questions_of(file, 1, 5) == [Question("a", 5)]
    with pytest.raises(ValueError, match=r"--num-prompts 3: .* has 2 prompts"):
        questions_of(file, 3, 5)
    for line, message in {
        "{": r":1 is no JSON",
        "[1]": r':1: must be an object with a text "prompt"',
        '{"prompt": ""}': r':1: must be an object with a text "prompt"',
        '{"prompt": "a", "output_tokens": 0}': r":1: output_tokens=0: must be an integer",
    }.items():
        file.write_text(line)
        with pytest.raises(ValueError, match=message):
            questions_of(file, None, 5)
    with pytest.raises(ValueError, match=r"--dataset-path .* cannot be read"):
        questions_of(tmp_path / "none", None, 5)


class Fake(http.server.BaseHTTPRequestHandler):
    """Answers like a server, with `max_tokens` pieces; the server's `faults` come first."""

    def log_message(self, format, *args):
        pass

    def do_GET(self):
        self.reply(200, {"data": [{"id": "org/tiny"}]} if self.server.lists else {"data": []})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, self.headers.get("Authorization"), body))
        fault = self.server.faults.pop(0) if self.server.faults else None
        if fault == "refuse":
            return self.reply(429, {"error": {"message": "full"}})
        if fault == "hang up at once":
            return self.connection.shutdown(socket.SHUT_RDWR)
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        new = body["max_tokens"]
        pieces = [json.dumps(piece("x")) for _ in range(new)]
        for data in [*pieces, json.dumps(usage(5, new)), DONE]:
            event = f"data: {data}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
            if fault == "hang up":
                return self.connection.shutdown(socket.SHUT_RDWR)
        self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def reply(self, status, body):
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def fake():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Fake)
    server.faults, server.seen, server.lists = [], [], True
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def command(*given):
    return CliRunner().invoke(app, ["bench", "serve", *given])


SMALL = ["--num-prompts", "6", "--random-input-len", "5", "--random-output-len", "3"]
SMALL += ["--vocab-size", "30"]

WRITTEN = {
    "date",
    "endpoint_type",
    "backend",
    "label",
    "model_id",
    "tokenizer_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
} | {
    f"{figure}_{name}_ms"
    for figure in ("mean", "median", "std", "p90", "p99")
    for name in ("ttft", "tpot", "itl", "e2el")
}


def test_the_command_counts_what_failed_and_saves_the_rest(fake, tmp_path):
    fake.faults = ["refuse", "hang up", "hang up at once"]
    given = ["--base-url", f"{fake.url}/v1", *SMALL, "--api-key", "secret", "--result-dir"]
    given += [str(tmp_path / "new"), "--save-result", "--label", "mine", "--goodput", "ttft:9e9"]
    ran = command(*given)
    assert ran.exit_code == 0, ran.output
    assert "requests failed              3" in ran.output
    assert "1 of 6 failed: HTTP 429: full" in " ".join(ran.output.split())
    [file] = (tmp_path / "new").iterdir()
    assert file.name.startswith("mine-infqps-tiny-")
    saved = json.loads(file.read_text())
    assert set(saved) == WRITTEN
    assert (saved["completed"], saved["failed"]) == (3, 3)
    assert (saved["total_input_tokens"], saved["total_output_tokens"]) == (15, 9)
    assert saved["request_goodput"] == saved["request_throughput"]
    assert saved["model_id"] == "org/tiny"
    assert saved["request_rate"] == "inf"
    path, key, body = fake.seen[0]
    assert (path, key) == (COMPLETIONS, "Bearer secret")
    assert len(body["prompt"]) == 5 and max(body["prompt"]) < 30
    assert body["ignore_eos"] is True and body["model"] == "org/tiny"


def test_a_chat_of_drawn_text_with_details_and_warm_ups(fake):
    given = ["--base-url", fake.url, *SMALL[:-2], "--tokenizer", "smollm2", "--endpoint", CHAT]
    given += ["--json", "--save-detailed", "--result-filename", "/dev/null", "--seed", "3"]
    given += ["--num-warmups", "2", "--max-concurrency", "2", "--no-ignore-eos"]
    ran = command(*given, "--temperature", "0")
    assert ran.exit_code == 0, ran.output
    printed = json.loads(ran.stdout)
    assert set(DETAILS) <= set(printed)
    assert "mean_client_queue_time_ms" in printed
    assert len(fake.seen) == 8
    first = fake.seen[0][2]
    assert isinstance(first["messages"][0]["content"], str)
    assert "ignore_eos" not in first and first["temperature"] == 0


def test_the_prompts_depend_on_the_seed_alone(fake):
    for rate, seed in (("inf", "1"), ("500", "1"), ("inf", "2")):
        given = ["--request-rate", rate, "--seed", seed, "--max-concurrency", "1"]
        assert command("--base-url", fake.url, *SMALL, *given).exit_code == 0
    prompts = [tuple(body["prompt"]) for _, _, body in fake.seen]
    assert prompts[:6] == prompts[6:12] != prompts[12:]


def test_a_run_of_which_nothing_came_fails(fake):
    fake.faults = ["refuse"] * 6
    ran = command("--base-url", fake.url, *SMALL)
    assert ran.exit_code == 1
    assert "6 of 6 failed: HTTP 429: full" in " ".join(ran.output.split())


def test_a_warm_up_that_fails_ends_the_run(fake):
    fake.faults = ["refuse"]
    ran = command("--base-url", fake.url, *SMALL, "--num-warmups", "1")
    assert ran.exit_code == 2
    assert "a warm-up request failed: HTTP 429: full" in ran.output


def test_servers_that_are_none(fake):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        ran = command("--base-url", f"http://127.0.0.1:{taken.getsockname()[1]}", *SMALL)
    assert ran.exit_code == 2
    assert "cannot be reached: ConnectError" in ran.output
    assert "Traceback" not in ran.output
    fake.lists = False
    ran = command("--base-url", fake.url, *SMALL)
    assert (ran.exit_code, "lists no model" in ran.output) == (2, True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--base-url", "localhost:80"], "--base-url 'localhost:80': must begin with http://"),
        (["--num-prompts", "0"], "--num-prompts=0: must be an integer of at least 1"),
        (["--max-concurrency", "0"], "--max-concurrency=0: must be"),
        (["--num-warmups", "-1"], "--num-warmups=-1: must be"),
        (["--seed", "-1"], "--seed=-1: must be"),
        (["--timeout", "0"], "--timeout 0.0: must be a number above 0"),
        (["--request-rate", "0"], "--request-rate 0.0: must be a number above 0"),
        (["--burstiness", "0"], "--burstiness 0.0: must be a number above 0"),
        (["--burstiness", "inf"], "--burstiness inf: must be finite"),
        (["--goodput", "ttft"], "--goodput 'ttft': must be one of ttft, tpot, e2el, a colon"),
        (["--goodput", "itl:5"], "--goodput 'itl:5': must be one of"),
        (["--goodput", "ttft:5 tpot:-1"], "--goodput 'tpot:-1': must be one of"),
        (["--metric-percentiles", "50,x"], "--metric-percentiles '50,x': must be numbers"),
        (["--metric-percentiles", "101"], "--metric-percentiles '101': must be numbers"),
        (["--dataset-name", "custom"], "--dataset-path and --dataset-name custom belong together"),
        (["--dataset-path", "x"], "--dataset-path and --dataset-name custom belong together"),
        (["--vocab-size", "9", "--endpoint", CHAT], "--vocab-size goes with /v1/completions"),
    ],
)
def test_options_out_of_range(given, message):
    ran = command(*given)
    assert ran.exit_code == 2
    assert message in " ".join(ran.output.split())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--random-input-len", "0"], "--random-input-len=0: must be an integer of at least 1"),
        (["--random-range-ratio", "1"], "--random-range-ratio 1.0: must be from 0 to below 1"),
        (["--random-prefix-len", "-1"], "--random-prefix-len=-1: must be"),
        (["--vocab-size", "0"], "--vocab-size=0: must be"),
    ],
)
def test_lengths_out_of_range(fake, given, message):
    ran = command("--base-url", fake.url, *SMALL, *given)
    assert ran.exit_code == 2
    assert message in ran.output


def test_a_model_without_a_tokenizer_here(fake, tmp_path):
    ran = command("--base-url", fake.url, "--tokenizer", str(tmp_path))
    assert ran.exit_code == 2
    assert "has no tokenizer to draw prompts with" in " ".join(ran.output.split())


def test_without_httpx_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.delitem(sys.modules, "jsparse.benchmark.serve", raising=False)
    monkeypatch.delitem(sys.modules, "jsparse.benchmark.questions", raising=False)
    monkeypatch.delattr("jsparse.benchmark.serve", raising=False)
    monkeypatch.delattr("jsparse.benchmark.questions", raising=False)
    ran = command()
    assert ran.exit_code == 2
    assert "pip install 'jsparse[server]'" in " ".join(ran.output.split())
