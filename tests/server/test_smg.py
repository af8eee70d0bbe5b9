"""Tests smg, SGLang's gateway for models, with two servers; other tests do not install it."""

import importlib.util
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as families

from tests.server.test_serve_command import served
from tests.support import patient

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("smg") is None, reason="needs the package smg"),
]
SMALL = ["--policy", "quest(budget=256)", "--max-model-len", "512", "--max-num-seqs", "2"]
BLOCK = 64  # tokens that requests share at once on a CPU


def free_ports(count: int) -> list[str]:
    """Returns ports for a process that cannot choose its own."""
    with ExitStack() as opened:
        taken = [opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [f"{each.getsockname()[1]}" for each in taken]


def until(condition: Callable[[], Any]) -> None:
    """Waits until a condition holds, for at most two minutes."""
    wait = threading.Event()
    assert any(condition() or wait.wait(0.1) for _ in range(1200))


def workers(gateway: str) -> dict[str, bool]:
    """Whether each server that the gateway knows is healthy, by address."""
    try:
        found = patient.get(f"{gateway}/workers").json()["workers"]
    except httpx.TransportError:  # it is starting
        return {}
    return {each["url"]: each["is_healthy"] for each in found}


@contextmanager
def gateway_of(urls: list[str], log):
    """Starts smg before servers, waits until it has found them, yields its address."""
    port, metrics = free_ports(2)
    command = [sys.executable, "-m", "smg", "launch", "--policy", "cache_aware"]
    command += ["--host", "127.0.0.1", "--port", port, "--health-check-interval-secs", "1"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", metrics]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--worker-urls", *urls], stdout=output, stderr=subprocess.STDOUT
        )
    gateway = f"http://127.0.0.1:{port}"
    try:
        until(lambda: process.poll() is not None or workers(gateway) == dict.fromkeys(urls, True))
        assert process.poll() is None, log.read_text()
        yield gateway
    finally:
        process.kill()
        process.wait()


def served_by(url: str) -> float:
    """The number of completions that a server has ended."""
    text = patient.get(f"{url}/metrics").text
    return sum(
        sample.value
        for family in families(text)
        if family.name == "vllm:request_success"
        for sample in family.samples
        if sample.name.endswith("_total")
    )


def test_smg_keeps_prefixes_together_and_survives_a_lost_server(tmp_path):
    with ExitStack() as opened:
        started = [opened.enter_context(served("smollm2", *SMALL)) for _ in range(2)]
        urls = [url for _, url in started]
        gateway = opened.enter_context(gateway_of(urls, tmp_path / "log"))
        models = patient.get(f"{gateway}/v1/models").json()["data"]
        assert [model["id"] for model in models] == ["smollm2"]
        ended = dict.fromkeys(urls, 0.0)

        def ask(subject: str, end: str) -> int:
            """Sends a prompt of such a beginning, returns how many tokens of it were cached."""
            prompt = " ".join(f"{subject} number {nth}," for nth in range(40)) + end
            body = {"model": "smollm2", "prompt": prompt, "max_tokens": 4, "temperature": 0}
            got = patient.post(f"{gateway}/v1/completions", json=body)
            assert got.status_code == 200, got.text
            return got.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        def asked(subject: str, end: str) -> tuple[str, int]:
            """Returns also which server replied."""
            cached, total = ask(subject, end), sum(ended.values()) + 1
            until(lambda: sum(map(served_by, urls)) == total)
            before = dict(ended)
            ended.update((url, served_by(url)) for url in urls)
            (server,) = (url for url in urls if ended[url] > before[url])
            return server, cached

        # new prefixes go to either server at random
        homes: dict[str, str] = {}
        for nth in range(30):
            server, _ = asked(subject := f"{nth}: case", " first")
            homes.setdefault(server, subject)
            if len(homes) == 2:
                break
        assert sorted(homes) == sorted(urls)
        for server, subject in homes.items():
            for end in (" second", " third"):
                again, cached = asked(subject, end)
                assert again == server and cached >= BLOCK

        (lost, gone), (_, left) = started
        lost.kill()
        lost.wait()
        before = served_by(left)
        assert ask(homes[gone], " fourth") == 0  # the other server has to read all of it
        assert ask(homes[gone], " fifth") >= BLOCK
        assert ask(homes[left], " fourth") >= BLOCK
        until(lambda: served_by(left) == before + 3)
        until(lambda: workers(gateway) == {gone: False, left: True})
        body = {"model": "smollm2", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        chat = patient.post(f"{gateway}/v1/chat/completions", json=body | {"max_tokens": 4})
        assert chat.text.rstrip().endswith("data: [DONE]")
