"""Tests the router of several replicas: routing, and the effects of lost replicas."""

import asyncio
import errno
import json
import socket
import tempfile
import threading
import time
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jsparse.server import run
from jsparse.server.errors import ApiError
from jsparse.server.front import Options
from jsparse.server.replicas import pictures, process, replica
from jsparse.server.replicas import router as router_module
from jsparse.server.replicas.balance import PREFIX_CHARS, Balance, Work, work_of
from jsparse.server.replicas.folder import PREFIX, socket_folder
from jsparse.server.replicas.process import About
from jsparse.server.replicas.replica import NeverReady, Replica
from jsparse.server.replicas.response import Lost, ReplicaResponse
from jsparse.server.replicas.router import Router
from jsparse.server.replicas.serve import make_app, serve
from tests.support import patient
from tests.support.serving_http import soon

COMPLETIONS = "/v1/completions"


class FakeProcess:
    """A replica's process: a server in a thread that responds as the prompt asks.

    `dies` ends it, at once or after the first event of a stream; `full` is refused; `waits` is
    answered after the client has left; `hangs` is a stream that does not end.
    """

    def __init__(self, path, asked):
        self.path, self.asked, self.alive, self.left = path, asked, True, threading.Event()
        self._about = About(("fake", "Nothing is sparse."), 100)
        routes = [
            Route(COMPLETIONS, self._complete, methods=["POST"]),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/live", self._live),
        ]
        self.server = uvicorn.Server(run.configured(Starlette(routes=routes)))
        path.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        listening.listen()
        self._loop = asyncio.new_event_loop()
        work = self.server.serve([listening])
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(work))
        self._thread.start()

    def told(self):
        about, self._about = self._about, None
        return about

    def die(self):
        self.alive = False
        if threading.current_thread() is self._thread:
            self._abort()
        else:  # connections may close meanwhile
            self._loop.call_soon_threadsafe(self._abort)
        self.server.should_exit = self.server.force_exit = True

    def _abort(self):
        for connection in list(self.server.server_state.connections):
            connection.transport.abort()

    def end(self):
        self.alive = False
        self.server.should_exit = self.server.force_exit = True
        self._thread.join()
        self._loop.close()

    async def _complete(self, request):
        body = json.loads(await request.body())
        self.asked.append(body["prompt"])
        match body["prompt"].split():
            case ["dies", *_] if not body.get("stream"):
                self.die()
            case ["full", *_] if self.asked is ALL[0]:
                return JSONResponse({"error": "full"}, 429, {"Retry-After": "7"})
            case ["fails", *_]:
                return JSONResponse({"error": {"code": "engine_error"}}, 500)
            case ["waits", *_]:
                while not await request.is_disconnected():
                    await asyncio.sleep(0.01)
                self.left.set()
        if body.get("stream"):
            return StreamingResponse(self._events(body), media_type="text/event-stream")
        return JSONResponse({"answer": body["prompt"]})

    async def _events(self, body):
        try:
            yield b"data: 1\n\n"
            if body["prompt"].startswith("hangs"):
                await asyncio.Event().wait()
        finally:
            self.left.set()
        await asyncio.sleep(0.05)
        if body["prompt"].startswith("dies"):
            self.die()
            await asyncio.sleep(1)
        yield b"data: [DONE]\n\n"

    async def _health(self, _):
        return JSONResponse({"status": "ready"})

    async def _metrics(self, _):
        return Response(exposed(len(self.asked)))

    async def _live(self, _):
        async def pictures():
            while True:
                yield b"data: " + json.dumps(picture(len(self.asked))).encode() + b"\n\n"
                await asyncio.sleep(0.01)

        return StreamingResponse(pictures(), media_type="text/event-stream")


# the requests of each replica, by its number
ALL: list[list[str]] = []


def exposed(count):
    registry = CollectorRegistry()
    for name, value in (("waiting", count), ("usage_perc", count / 10)):
        Gauge(f"jsparse:{name}", "It.", ["model_name"], registry=registry).labels("m").set(value)
    seconds = Histogram("jsparse:seconds", "It.", registry=registry, buckets=(1, 10))
    for _ in range(count):
        seconds.observe(5)
    return generate_latest(registry)


def picture(count):
    return {
        "running": count,
        "kv_cache_usage": count / 10,
        "dense_bound_tokens_per_second": None,
        "attended_by_layer": [count / 10, 1.0],
        "requests": [f"{count}"] * count,
    }


@contextmanager
def routed(folder, count=2, **options):
    """Serves fake replicas; yields the address and the router once all are ready."""
    ALL[:] = [[] for _ in range(count)]
    router = Router(
        Options("tiny", **options),
        [
            Replica(nth, lambda nth=nth: FakeProcess(folder / f"{nth}", ALL[nth]))
            for nth in range(count)
        ],
    )
    listening = run.listen("127.0.0.1", 0)
    server = run.Server(make_app(router), router)
    beside = map(router.watch, router.replicas)
    thread = threading.Thread(target=lambda: server.answer(listening, *beside))
    thread.start()
    try:
        assert soon(lambda: all(each.ready for each in router.replicas))
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", router
    finally:
        server.should_exit = server.force_exit = True
        thread.join()
        for each in router.replicas:
            each.end()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(replica, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(replica, "PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(router_module, "INTERVAL", 0.02)
    monkeypatch.setattr(pictures, "INTERVAL", 0.02)


@pytest.fixture
def folder():
    # the path of a Unix socket is limited to about a hundred characters
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def post(url, prompt, **body):
    return httpx.post(f"{url}{COMPLETIONS}", json={"prompt": prompt, **body}, timeout=30)


def test_equal_prefixes_go_to_one_replica_and_the_rest_to_the_least_loaded(folder):
    with routed(folder) as (url, _):
        documents = [f"{letter}" * PREFIX_CHARS for letter in "abc"]
        for nth in range(4):
            for document in documents:
                assert post(url, f"{document} {nth}").json() == {"answer": f"{document} {nth}"}
        begun = [{prompt[0] for prompt in asked} for asked in ALL]
        assert begun[0] | begun[1] == {*"abc"}
        assert not begun[0] & begun[1]
        assert begun[0]
        assert begun[1]


def test_overloaded_replica_gets_no_requests_for_its_cached_prefixes():
    balance, work = Balance(3), Work(100, b"document")
    with balance.sent(work, 1):
        assert balance.choose(work, (0, 1, 2)) == 1
        with balance.sent(work, 1):
            assert balance.choose(work, (0, 1, 2)) == 0
            assert balance.choose(work, (1,)) == 1
    assert balance.choose(work, (0, 1, 2)) == 1
    balance.forget(1)
    assert balance.choose(work, (0, 1, 2)) == 0


def test_work_of_a_request_is_its_tokens():
    for body, tokens, known in [
        ({"prompt": "four" * 10, "max_tokens": 5, "n": 3}, 25, False),
        ({"prompt": [["a"] * 600, ["b"]], "max_tokens": 5}, 611, True),
        ({"prompt": [1] * 600, "max_completion_tokens": 5}, 605, True),
        ({"messages": [{"role": "user", "content": "w" * PREFIX_CHARS}]}, 256 + 520, True),
        ({"prompt": ["a" * 8, "b" * 8], "max_tokens": 1}, 6, False),
        ({"prompt": [], "max_tokens": "x", "n": -1}, 256, False),
        ([], 0, False),
    ]:
        work = work_of(body)
        assert work.tokens == tokens, body
        assert (work.prefix is not None) == known, body
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "w" * PREFIX_CHARS}]}
    tools = [{"type": "function", "function": {"name": "f" * 4000}}]
    plain, offered, hidden = map(
        work_of, (chat, chat | {"tools": tools}, chat | {"tools": tools, "tool_choice": "none"})
    )
    assert offered.tokens > plain.tokens + 1000 and offered.prefix != plain.prefix
    assert hidden == plain


def test_replica_lost_before_the_response_starts_is_replaced(folder, monkeypatch):
    monkeypatch.setattr(Balance, "choose", lambda self, work, among: among[0])
    with routed(folder) as (url, router):
        answer = post(url, "fails")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "unavailable"
        assert ALL == [["fails"], ["fails"]]
        before = [each._process for each in router.replicas]
        start, tries = router.replicas[0]._start, iter([OSError("no memory")])

        def fails_once():
            if error := next(tries, None):
                raise error
            return start()

        monkeypatch.setattr(router.replicas[0], "_start", fails_once)
        assert post(url, "dies").status_code == 503
        assert ALL[1] == ["fails", "dies"]
        # they are started again after a failed first attempt
        pairs = list(zip(router.replicas, before, strict=True))
        assert soon(lambda: all(each.ready and each._process is not old for each, old in pairs))
        assert post(url, "again").json() == {"answer": "again"}


def test_request_that_kills_engines_does_not_kill_all(folder):
    with routed(folder, 3) as (url, router):
        assert post(url, "dies").status_code == 503
        assert sum(map(len, ALL)) == 2
        assert soon(lambda: any(each.ready for each in router.replicas))


def test_started_stream_of_a_lost_replica_ends_with_an_error(folder):
    with routed(folder) as (url, _):
        answer = post(url, "dies", stream=True)
        first, error, rest = answer.text.split("\n\n")
        assert answer.status_code == 200
        assert (first, rest) == ("data: 1", "")
        told = json.loads(error.removeprefix("data: "))["error"]
        assert (told["type"], told["code"]) == ("server_error", "engine_error")
        assert sum(map(len, ALL)) == 1
        assert post(url, "whole", stream=True).text == "data: 1\n\ndata: [DONE]\n\n"


def test_full_replica_is_followed_by_others(folder, monkeypatch):
    monkeypatch.setattr(Balance, "choose", lambda self, work, among: among[0])
    with routed(folder) as (url, _):
        assert post(url, "full").json() == {"answer": "full"}
    with routed(folder, 1) as (url, _):
        answer = post(url, "full")
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "7"


@pytest.mark.parametrize("prompt", ["waits", "hangs"])
def test_replica_is_notified_when_a_client_leaves(folder, prompt):
    with routed(folder, 1) as (url, router):
        host, port = url.removeprefix("http://").split(":")
        peer = HTTPConnection(host, int(port))
        body = json.dumps({"prompt": prompt, "stream": prompt == "hangs"})
        peer.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
        assert soon(lambda: ALL[0] == [prompt])
        if prompt == "hangs":
            answer = peer.getresponse()
            assert answer.readline() == b"data: 1\n"
            answer.close()
        peer.close()
        fake = router.replicas[0]._process
        assert isinstance(fake, FakeProcess)
        assert fake.left.wait(10)
        assert soon(lambda: router.inside == 0 and router._balance._tokens == [0])


def test_gate_precedes_the_router(folder):
    with routed(folder, 1, api_key="key") as (url, _):
        assert post(url, "a").status_code == 401
        assert patient.get(f"{url}/metrics").status_code == 401
        assert patient.get(f"{url}/health").json() == {"status": "ready", "replicas": [True]}


def test_metrics_are_summed_or_kept_per_replica(folder):
    with routed(folder) as (url, router):
        for prompt in "abc":
            post(url, prompt)
        counts = sorted(map(len, ALL))
        assert counts == [1, 2]
        total = patient.get(f"{url}/metrics").text.splitlines()
        assert 'jsparse:waiting{model_name="m"} 3.0' in total
        assert 'jsparse:usage_perc{model_name="m"} 0.15000000000000002' in total
        assert 'jsparse:seconds_bucket{le="10.0"} 3.0' in total
        assert not any("_created" in line for line in total)
        apart = patient.get(f"{url}/metrics/replicas").text
        for nth, asked in enumerate(ALL):
            assert f'jsparse:waiting{{model_name="m",replica="{nth}"}} {len(asked)}.0' in apart
        assert newest_picture(url) == {
            "running": 3,
            "kv_cache_usage": pytest.approx(0.15),
            "dense_bound_tokens_per_second": None,
            "attended_by_layer": [pytest.approx(0.15), 1.0],
            "requests": ["1", "2", "2"] if len(ALL[0]) == 1 else ["2", "2", "1"],
        }
        # counters of a lost replica keep their values
        lost, old = router.replicas[0], router.replicas[0]._process
        counted = len(ALL[0])
        assert isinstance(old, FakeProcess)
        old.die()
        ALL[0].clear()
        assert soon(lambda: lost._process is not old and lost.ready)
        for _ in range(2):
            total = patient.get(f"{url}/metrics").text.splitlines()
            assert f'jsparse:waiting{{model_name="m"}} {3.0 - counted}' in total
            assert 'jsparse:seconds_bucket{le="10.0"} 3.0' in total


def newest_picture(url):
    """The state from /live once it includes all replicas."""
    with patient.stream("GET", f"{url}/live") as live:
        lines = (line for line in live.iter_lines() if line)
        pictures = (json.loads(line.removeprefix("data: ")) for line in lines)
        return next(each for each in pictures if len(each["requests"]) == each["running"] == 3)


def test_open_page_does_not_delay_shutdown(folder):
    with routed(folder, drain_seconds=60.0) as (url, router):
        begun, ended = threading.Event(), threading.Event()

        def look():
            with httpx.stream("GET", f"{url}/live", timeout=30) as live:
                for _ in live.iter_lines():
                    begun.set()
            ended.set()

        looking = threading.Thread(target=look)
        looking.start()
        assert begun.wait(10)
        router.draining = True
        looking.join(10)
        assert ended.is_set()
        assert soon(lambda: router.inside == 0)


def test_hung_replica_gets_no_requests_and_is_restarted(folder, monkeypatch):
    monkeypatch.setattr(replica, "HEALTH_SECONDS", 0.05)
    monkeypatch.setattr(replica, "MAX_SILENT", 10**6)
    ask, hung = Replica._unhealthy, []

    async def unhealthy(each):
        if each in hung:
            raise TimeoutError
        return await ask(each)

    monkeypatch.setattr(Replica, "_unhealthy", unhealthy)
    with routed(folder) as (url, router):
        first, old = router.replicas[0], router.replicas[0]._process
        hung.append(first)
        assert soon(lambda: not first.ready)
        for nth in range(4):
            assert post(url, f"{nth}").json() == {"answer": f"{nth}"}
        assert ALL[0] == []
        hung.clear()
        assert soon(lambda: first.ready)
        assert first._process is old
        hung.append(first)
        monkeypatch.setattr(replica, "MAX_SILENT", 2)
        assert soon(lambda: first._process is not old and first.ready)


def test_streams_of_a_hung_replica_end_before_its_process(folder, monkeypatch):
    monkeypatch.setattr(replica, "HEALTH_SECONDS", 0.05)
    end, told, in_time = FakeProcess.end, threading.Event(), []
    begun = threading.Event()  # the client has the first event

    async def unhealthy(each):
        if begun.is_set() and ALL[each.nth] == ["hangs"]:
            raise TimeoutError

    def ends(fake):
        if fake.asked == ["hangs"]:
            in_time.append(told.wait(10))
            fake.asked.clear()
        end(fake)

    monkeypatch.setattr(Replica, "_unhealthy", unhealthy)
    monkeypatch.setattr(FakeProcess, "end", ends)
    with routed(folder, 1) as (url, _):
        body = {"prompt": "hangs", "stream": True}
        with httpx.stream("POST", f"{url}{COMPLETIONS}", json=body, timeout=30) as stream:
            lines = stream.iter_lines()
            assert next(lines) == "data: 1"
            begun.set()
            (error,) = filter(None, lines)
        told.set()
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_error"
        assert soon(lambda: in_time)
        assert in_time[0]


def test_silent_replica_times_out(folder, monkeypatch):
    monkeypatch.setattr(replica, "SILENT_SECONDS", 0.01)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "0"))
        listening.listen()
        silent = Replica(0, lambda: None)
        silent._path = folder / "0"
        with pytest.raises(TimeoutError):
            asyncio.run(silent._unhealthy())


def test_only_faults_of_the_replica_count_as_lost(folder, monkeypatch):
    for number, raised in [
        (errno.ECONNREFUSED, Lost),
        (errno.ENOENT, Lost),
        (errno.ECONNRESET, Lost),
        (errno.EMFILE, ApiError),
        (errno.ENFILE, ApiError),
        (errno.ENOBUFS, ApiError),
    ]:

        async def connect(number=number):
            async def refuse(*_):
                raise OSError(number, "")

            monkeypatch.setattr(asyncio.get_running_loop(), "create_unix_connection", refuse)
            await ReplicaResponse.to(folder / "0", "GET", "/health")

        with pytest.raises(raised) as caught:
            asyncio.run(connect())
        if isinstance(caught.value, ApiError):
            assert (caught.value.status, caught.value.headers["Retry-After"]) == (503, "1"), number


def test_replica_with_a_full_backlog_is_retried(folder, monkeypatch):
    tries = []

    async def connect():
        async def busy(make, _):
            tries.append(1)
            if len(tries) < 3:
                raise BlockingIOError(errno.EAGAIN, "")
            return None, make()

        monkeypatch.setattr(asyncio.get_running_loop(), "create_unix_connection", busy)
        return await ReplicaResponse.to(folder / "0", "GET", "/health")

    assert isinstance(asyncio.run(connect()), ReplicaResponse)
    assert len(tries) == 3


def test_router_without_descriptors_reports_it_and_keeps_its_replicas(folder, monkeypatch):
    monkeypatch.setattr(replica, "HEALTH_SECONDS", 0.0)
    to, asked = ReplicaResponse.to, []

    async def full(path, method, target, body=None):
        asked.append(target)
        raise ApiError(503, "the server is full")

    with routed(folder) as (url, router):
        before = [each._process for each in router.replicas]
        monkeypatch.setattr(ReplicaResponse, "to", full)
        refused = post(url, "a")
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        asked.clear()
        assert soon(lambda: asked.count("/health") > 10)
        monkeypatch.setattr(ReplicaResponse, "to", to)
        assert post(url, "a").json() == {"answer": "a"}
        assert [each._process for each in router.replicas] == before


def test_one_failed_health_check_ends_no_replica(folder, monkeypatch):
    monkeypatch.setattr(replica, "HEALTH_SECONDS", 0.0)
    ask, failures = Replica._unhealthy, []

    async def unhealthy(each):
        if len(failures) % 3 != 2:  # two in a row
            failures.append(each)
            raise Lost("no answer")
        failures.append(None)
        return await ask(each)

    with routed(folder, 1) as (_, router):
        before = router.replicas[0]._process
        monkeypatch.setattr(Replica, "_unhealthy", unhealthy)
        assert soon(lambda: len(failures) > 12)
        assert router.replicas[0]._process is before


class Loading:
    """A replica's process that is still loading its model."""

    path, alive, ended = "/nowhere", True, False

    def told(self):
        return None

    def end(self):
        self.ended = True


@pytest.mark.parametrize("begin", [0.0, 1000.0], ids=["never listens", "stops listening"])
def test_replica_that_hangs_during_startup_is_restarted(monkeypatch, begin):
    """Also at the first start; the first response may take longer than later ones."""
    monkeypatch.setattr(replica, "HEALTH_SECONDS", 0.0)
    monkeypatch.setattr(replica, "START_SECONDS", begin)
    asked, started, counts = [], [], []

    async def unhealthy(_):
        asked.append(1)
        if begin and len(asked) == 6:  # after more failures than later ones allow
            return "the model is being loaded"
        raise Lost("nobody listens")

    def start():
        counts.append(len(asked))
        started.append(Loading())
        return started[-1]

    async def watch():
        watching = asyncio.create_task(Replica(0, start).watch(lambda: None))
        while len(started) < 2:
            await asyncio.sleep(0.01)
        watching.cancel()

    monkeypatch.setattr(Replica, "_unhealthy", unhealthy)
    asyncio.run(asyncio.wait_for(watch(), 20))
    assert started[0].ended
    assert counts == [0, replica.MAX_SILENT + (6 if begin else 0)]


def test_folders_of_killed_routers_are_removed(folder, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    left, other = folder / f"{PREFIX}left", folder / "jsparse-other"
    for each in (left, other):
        each.mkdir()
        (each / "replica 0").touch()
    with socket_folder() as own:
        assert not left.exists()
        assert own.stat().st_mode & 0o777 == 0o700
        with socket_folder() as second:
            assert second != own and own.exists()
    assert [each.name for each in folder.iterdir()] == ["jsparse-other"]


def test_all_clients_of_live_share_one_stream_of_each_replica(folder):
    with routed(folder, 1) as (url, router):
        fake = router.replicas[0]._process
        assert isinstance(fake, FakeProcess)
        with (
            patient.stream("GET", f"{url}/live") as one,
            patient.stream("GET", f"{url}/live") as two,
        ):
            lines = [each.iter_lines() for each in (one, two)]
            assert all(next(each).startswith("data: ") for each in lines)
            assert len(fake.server.server_state.connections) == 1
        assert soon(lambda: not fake.server.server_state.connections)
        assert not router.pictures.newest


def test_replica_that_cannot_start_ends_the_server():
    refused = SimpleNamespace(path="/nowhere", alive=True, told=lambda: "max_model_len: too much")
    with pytest.raises(NeverReady, match="^max_model_len: too much$"):
        asyncio.run(Replica(0, lambda: refused).watch(lambda: None))
    ended = SimpleNamespace(path="/nowhere", alive=False, told=lambda: None)
    with pytest.raises(NeverReady, match="^replica 3 has ended$"):
        asyncio.run(Replica(3, lambda: ended).watch(lambda: None))


def hang(*_):
    """Runs in place of a replica's server."""
    time.sleep(5)


def test_process_that_does_not_end_in_time_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "_main", hang)
    monkeypatch.setattr(process, "END_SECONDS", 0.01)
    replica = process.ReplicaProcess(Options("tiny"), list, tmp_path / "0", None)
    replica.end()
    assert not replica.alive


def test_each_replica_has_a_gpu(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-8a")
    assert process.visible_gpus() == ["3", "GPU-8a"]
    with pytest.raises(ValueError, match="data_parallel_size=3: must be at most 2, since 2 GPUs"):
        serve(Options("tiny"), [lambda: None] * 3, 1, None, on_ready=print)
    with pytest.raises(ValueError, match="data_parallel_size=2 with 2 GPUs each: must be a"):
        serve(Options("tiny"), [lambda: None] * 2, 2, None, on_ready=print)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0, 1,-1,2")
    assert process.visible_gpus() == ["0", "1"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(process, "find_spec", lambda name: name)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES: must name the GPUs"):
        process.visible_gpus()
    monkeypatch.setattr(process, "find_spec", lambda name: None)
    assert process.visible_gpus() == []
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert process.visible_gpus() == []


def test_mig_instances_replace_their_gpu():
    listed = (
        "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-a)\n"
        "  MIG 3g.40gb     Device  0: (UUID: MIG-b)\n"
        "  MIG 3g.40gb     Device  1: (UUID: MIG-c)\n"
        "GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-d)\n"
    )
    assert process._usable(listed) == ["MIG-b", "MIG-c", "GPU-d"]
    assert process._usable("No devices were found") == []
