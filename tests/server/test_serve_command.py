"""Tests the command `jsparse serve` in a separate process."""

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

import jsparse
from jsparse.cli.app import app
from tests.support import patient

TINY = str(Path(__file__).parents[1] / "fixtures" / "hf" / "llama3" / "model.gguf")
TWO_HOSTS = ["--nnodes", "2", "--master-addr", "127.0.0.1"]
SMALL = ["--max-model-len", "256", "--max-num-seqs", "4"]


def command(*arguments):
    return [sys.executable, "-m", "jsparse", "serve", *arguments]


@contextmanager
def served(*arguments, lines=1, **environment):
    """Starts a server on any port, waits until it is ready, yields the process and the address.

    One of its first `lines` contains the address.
    """
    process = subprocess.Popen(
        command(*arguments, "--port", "0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    try:
        assert process.stdout is not None
        for _ in range(lines):
            line = process.stdout.readline()
            if found := re.search(r"http://\S+", line):
                break
        assert found, (line, process.stderr and process.stderr.read())
        yield process, found[0]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_bad_options_are_refused_at_once(capsys):
    for arguments, message in [
        (["--port", "70000"], "--port 70000: must be from 0 to 65535"),
        (["--max-waiting", "-1"], "--max-waiting -1: must be at least 0"),
        (["--seed", "-1"], "--seed -1: must be from 0"),
        (["--api-key", "a b"], "--api-key: must be one or more visible ASCII characters"),
        (["--policy", "nope"], "unknown policy 'nope'"),
        (["--default-chat-template-kwargs", "no"], "--default-chat-template-kwargs no: must be a"),
        (["--host", "256.0.0.1"], "--host 256.0.0.1 --port 0"),
        (["--nnodes", "0"], "--nnodes 0: must be at least 1"),
        (["--node-rank", "1"], "--node-rank 1: must be from 0 to 0"),
        (["--master-addr", "a"], "--master-addr a: must be given with --nnodes above 1"),
        (["--headless"], "--headless: must be given with --node-rank above 0"),
        ([*TWO_HOSTS], "--tensor-parallel-size 1: must be a multiple of 2"),
        (
            [*TWO_HOSTS, "--tensor-parallel-size", "2", "--data-parallel-size", "2"],
            "--data-parallel-size 2: must be 1 where --nnodes is above 1",
        ),
    ]:
        assert message in refusal(capsys, *arguments)


def refusal(capsys, *arguments):
    """The one-line reason why the command does not start."""
    with pytest.raises(SystemExit) as ended:
        app(["serve", TINY, "--port", "0", *arguments], prog_name="jsparse")
    shown = capsys.readouterr().err
    assert (ended.value.code, len(shown.splitlines())) == (2, 1), shown
    return shown


def test_coordinator_port_in_use_is_refused(capsys):
    with socket.create_server(("", 0)) as taken:
        at = ["--master-port", f"{taken.getsockname()[1]}", "--tensor-parallel-size", "2"]
        assert f"{' '.join(at[:2])}: must be free on this host" in refusal(capsys, *TWO_HOSTS, *at)


def test_missing_extra_is_named(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("jsparse.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("jsparse.server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install '.[server]'" in refusal(capsys)


@pytest.mark.slow
def test_sigterm_under_load_loses_no_response():
    """Running requests finish; new ones are refused."""
    with served(TINY, *SMALL, JSPARSE_API_KEY="key") as (process, url):
        begun: queue.Queue[int] = queue.Queue()
        key = {"Authorization": "Bearer key"}
        body = {"prompt": "the cat", "max_tokens": 200, "temperature": 0, "ignore_eos": True}

        def ask(nth):
            pieces = []
            with (
                httpx.Client(base_url=url, headers=key, timeout=120) as client,
                client.stream("POST", "/v1/completions", json=body | {"stream": True}) as got,
            ):
                for line in got.iter_lines():
                    if line and not pieces:
                        begun.put(nth)
                    pieces.append(line)
            return got.status_code, pieces

        with ThreadPoolExecutor(12) as pool:
            asked = [pool.submit(ask, nth) for nth in range(12)]
            for _ in range(4):
                begun.get(timeout=60)
            process.send_signal(signal.SIGTERM)
            wait, codes = threading.Event(), set()
            for _ in range(100):
                try:
                    codes.add(
                        patient.post(f"{url}/v1/completions", json=body, headers=key).status_code
                    )
                    codes.add(patient.get(f"{url}/health").status_code)
                except httpx.TransportError:
                    break
                if codes == {503}:
                    break
                wait.wait(0.01)
            answers = [each.result() for each in asked]
        assert codes - {200} == {503}
        full = [pieces for status, pieces in answers if status == 200]
        assert len(full) >= 4
        assert {status for status, _ in answers} <= {200, 503}
        assert len({text_of(pieces) for pieces in full}) == 1
        assert all(pieces[-2] == "data: [DONE]" for pieces in full)
        assert process.wait(timeout=60) == 0
        assert process.stderr is not None and "Traceback" not in process.stderr.read()


def text_of(pieces):
    *events, _ = (line.removeprefix("data: ") for line in pieces if line)
    return "".join(json.loads(each)["choices"][0]["text"] for each in events)


def replicas_of(router):
    of_router = psutil.Process(router.pid).children()
    return [each for each in of_router if "spawn_main" in " ".join(each.cmdline())]


def stream(url, begun, body):
    """Returns the last event of a stream; `begun` receives each event."""
    pieces = []
    with patient.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as got:
        for line in got.iter_lines():
            if line:
                begun.put(1)
                pieces.append(line)
    return pieces[-1]


LONG = {"prompt": "the cat", "max_tokens": 240, "temperature": 0, "ignore_eos": True}


@pytest.mark.slow
def test_killed_replica_is_restarted():
    """Its streams end with an error, others continue; without their router, all replicas end."""
    with served(TINY, *SMALL, "--data-parallel-size", "2", "--seed", "3") as (process, url):
        begun: queue.Queue[int] = queue.Queue()
        before = replicas_of(process)
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(stream, url, begun, LONG) for _ in range(2)]
            begun.get(timeout=60)
            before[0].kill()
            last = [each.result() for each in asked]
        assert "data: [DONE]" in last
        drawn = httpx.post(f"{url}/v1/completions", json=LONG | {"temperature": 1}, timeout=60)
        assert drawn.status_code == 200
        wait = threading.Event()
        for _ in range(600):
            if patient.get(f"{url}/health").json()["replicas"] == [True, True]:
                break
            wait.wait(0.1)
        after = replicas_of(process)
        assert len(after) == 2
        assert before[1] in after
        process.kill()
        gone, alive = psutil.wait_procs(after, timeout=30)
        assert len(gone) == 2
        assert not alive


@pytest.mark.slow
def test_model_on_two_processes_is_served_by_one_of_them(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = f"{free.getsockname()[1]}"
    shared = [TINY, *SMALL, *TWO_HOSTS, "--master-port", port, "--tensor-parallel-size", "2"]
    shared += ["--check-ranks", "--policy", "quest(budget=16)", "--max-logprobs", "0"]
    alone = {"JAX_NUM_CPU_DEVICES": "1"}
    with (tmp_path / "other").open("w") as said:
        other = subprocess.Popen(
            command(*shared, "--node-rank", "1", "--headless"),
            stdout=said,
            stderr=said,
            env=os.environ | alone,
        )
    try:
        # libraries print before the line with the address
        with served(*shared, **alone, lines=20) as (process, address):
            asked = {"model": TINY, "prompt": "Hello", "max_tokens": 8, "temperature": 0}
            answered = httpx.post(f"{address}/v1/completions", json=asked, timeout=120).json()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        assert other.wait(60) == 0, (tmp_path / "other").read_text()
    finally:
        other.kill()
        other.wait()
    llm = jsparse.LLM(TINY, "quest(budget=16)", max_model_len=256, max_num_seqs=4)
    (out,) = llm.generate("Hello", jsparse.SamplingParams(max_tokens=8, temperature=0))
    assert answered["choices"][0]["text"] == out.outputs[0].text
