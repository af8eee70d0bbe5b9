"""Tests the prompts and the command of `jsparse bench serve`, against a server on a thread."""

import http.server
import json
import math
import socket
import sys
import threading

import numpy as np
import pytest
from typer.testing import CliRunner

from jsparse.benchmark import serve
from jsparse.benchmark.latency import DETAILS
from jsparse.benchmark.questions import (
    prefix_questions,
    questions_of,
    random_questions,
    tokenizer_of,
    words_below,
    words_of,
)
from jsparse.benchmark.serve import BenchRequest
from jsparse.benchmark.workload import arrivals
from jsparse.cli.app import app

COMPLETIONS, CHAT = serve.ENDPOINTS
DONE = "[DONE]"


def piece(text, finish=None):
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def usage(prompt, new):
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": new}}


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
    assert questions_of(file, None, 5) == [BenchRequest("a", 5), BenchRequest("b", 7)]
    assert questions_of(file, 1, 5) == [BenchRequest("a", 5)]
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
    assert "pip install '.[server]'" in " ".join(ran.output.split())
