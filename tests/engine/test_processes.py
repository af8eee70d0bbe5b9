"""Tests models whose devices belong to several processes, and the links between processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

import jsparse
from jsparse.engine import core, follower
from jsparse.engine.errors import EngineError
from jsparse.machine import peers, processes
from jsparse.machine.peers import Peer
from jsparse.machine.processes import Link
from jsparse.models.checkpoint import spread
from jsparse.runtime import compilation
from jsparse.runtime.compilation import Program
from jsparse.runtime.spread_programs import SHARDED
from tests.support.serving import greedy, tiny_llm
from tests.support.tiny import random_prompts, tiny_params

PROMPTS = random_prompts((9, 41, 21), seed=5)


@pytest.fixture
def gone(monkeypatch):
    """Records the messages of processes that would otherwise exit."""
    said = []
    monkeypatch.setattr(peers, "lost", said.append)
    return said


@pytest.fixture
def linked(gone):
    """The two ends of a link."""
    here, there = _tcp_pair()
    leader, other = Link(0, [Peer(here, "process 1")]), Link(1, [Peer(there, "process 0")])
    yield leader, other
    leader.end()
    wait_for(lambda: not any(x.name.startswith("jsparse-process") for x in threading.enumerate()))


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        there = socket.create_connection(listening.getsockname())
        return listening.accept()[0], there


def wait_for(holds) -> None:
    """Waits for a condition, up to ten seconds."""
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_messages_arrive_in_order_with_their_arrays(linked):
    leader, other = linked
    arrays = [
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.zeros((0, 4), np.float32),
        np.array([True, False]),
        np.float32(2.5).reshape(()),
    ]
    leader.send({"run": ["decode", [8], [["choice", "greedy"]]]}, arrays)
    leader.send({"expect": []})
    leader.end()
    (first, got), (second, none) = other.messages()
    assert first == {"run": ["decode", [8], [["choice", "greedy"]]]}
    for array, own in zip(arrays, got, strict=True):
        assert (array.dtype, array.shape) == (own.dtype, own.shape)
        np.testing.assert_array_equal(array, own)
    assert second == {"expect": []}
    assert none == []


def test_all_processes_see_the_values_of_each(linked):
    leader, other = linked
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(other.all_gather("free memory", 5)))
    thread.start()
    assert leader.all_gather("free memory", 7) == [7, 5]
    thread.join()
    assert found == [[7, 5]]


def test_unreachable_process_is_named(linked):
    leader, other = linked
    other.send({"engine": {}})
    where = r"process 1 is at \['engine'\], this one at 'free memory'"
    with pytest.raises(ValueError, match=where):
        leader.all_gather("free memory", 7)


PARTS = (b"", b"\0\0\0\5", b"\0\0\0\5\0\0\0\0[1")


def test_process_that_dies_ends_the_others(gone):
    for part in (*PARTS, b"\0\0\0\2\0\0\0\0{}"):
        here, there = _tcp_pair()
        Peer(here, "process 1")
        there.sendall(part)
        there.close()
        wait_for(lambda: gone)
        assert gone.pop() == "process 1 has ended; this process cannot continue without it", part


def test_process_that_hangs_ends_the_others(gone, monkeypatch):
    """At any point within a message."""
    monkeypatch.setattr(peers, "SILENT", 0.05)
    for part in PARTS:
        here, there = _tcp_pair()
        Peer(here, "process 1")
        with there:
            there.sendall(part)
            wait_for(lambda: gone)
        assert gone.pop().startswith("process 1 has sent nothing for 0.05 seconds"), part


def test_processes_send_heartbeats(monkeypatch, gone):
    """Beats are sent when there are no messages, and none is taken for a message."""
    monkeypatch.setattr(peers, "BEAT", 0.01)
    here, there = _tcp_pair()
    peer = Peer(here, "process 1")
    with there, there.makefile("rb") as stream:
        for _ in range(3):
            head, body = peers._HEAD.unpack(stream.read(peers._HEAD.size))
            said = stream.read(head)
            assert (json.loads(said), body) == ([{"beat": True}, []], 0)
            there.sendall(peers._HEAD.pack(head, body) + said)
        last = b'[{"end": true}, []]'
        there.sendall(peers._HEAD.pack(len(last), 0) + last)
        assert peer.receive(to_the_end=True) == ({"end": True}, [])
    assert gone == []


def test_farewells_run_before_the_exit(monkeypatch, capsys):
    order = []

    def fail():
        order.append("farewell")
        raise ValueError

    def end(status):
        order.append(status)
        raise SystemExit

    monkeypatch.setattr(peers, "farewells", [fail])
    monkeypatch.setattr(peers.os, "_exit", end)
    with pytest.raises(SystemExit):
        peers.lost("process 1 has ended")
    assert order == ["farewell", 1]
    assert capsys.readouterr().err == "jsparse: process 1 has ended\n"


def test_failure_of_a_process_is_reported_with_its_reason(linked, gone):
    leader, other = linked
    other.send({"failed": "ValueError('too small')"})
    wait_for(lambda: gone)
    assert gone[0] == "process 1 has failed: ValueError('too small')"
    assert leader.index == 0


def test_process_that_ends_before_the_start_ends_all(linked, capsys):
    leader, other = linked
    leader.end()
    with pytest.raises(SystemExit, match="1"):
        other.all_gather("free memory", 5)
    said = capsys.readouterr().err
    assert said == "jsparse: process 0 has ended; this process cannot continue without it\n"


def test_exit_after_the_end_is_not_a_loss(linked, gone):
    leader, other = linked
    leader.end()
    assert list(other.messages()) == []
    wait_for(lambda: not any(x.name.startswith("jsparse-process") for x in threading.enumerate()))
    assert gone == []


@pytest.fixture
def elsewhere(linked, gone, monkeypatch):
    """Returns a function that makes an LLM whose programs also run elsewhere."""
    leader, other = linked

    def lost(why: str) -> None:
        gone.append(why)
        for peer in (*leader.peers, *other.peers):  # so that no thread waits for a message
            peer.messages.put(({"end": True}, []))

    monkeypatch.setattr(peers, "lost", lost)
    monkeypatch.setattr(processes, "link", lambda: leader)
    monkeypatch.setattr(leader, "all_gather", lambda what, value: [value])

    def compiled_there(program: Program, data: bytes, *args: Any, **kwargs: Any) -> Any:
        assert len(data) > 1000  # despite other devices
        return program.ahead(*args, **kwargs).result()

    monkeypatch.setattr(Program, "unpacked", compiled_there)
    # as if devices belonged to several processes
    real = compilation._finish

    def finish(made: Any, name: Any, _: bool, job: Any) -> None:
        real(made, name, True, job)

    monkeypatch.setattr(compilation, "_finish", finish)
    made_programs, threads = core.LeaderPrograms, []

    def make(scale: float) -> jsparse.LLM:
        def programs(spec, params, link, **options):
            mesh = Mesh(np.array(jax.devices()[2:4]), ("ranks",))
            place = NamedSharding(mesh, SHARDED)
            weights = jax.tree.map(lambda x: jax.device_put(scale * x, place), params.weights)
            own = replace(params, weights=weights, mesh=mesh)
            deployment = spec.deployment._replace(params=own.without_weights())
            theirs = replace(spec, deployment=deployment)

            def follow() -> None:
                with suppress(SystemExit):
                    follower.follow_and_exit(theirs, own, other, check_ranks=True)

            threads.append(threading.Thread(target=follow, daemon=True))
            threads[0].start()
            return made_programs(spec, params, link, **options)

        monkeypatch.setattr(core, "LeaderPrograms", programs)
        params = spread(tiny_params(num_layers=2, num_heads=4, num_kv_heads=2), 2)
        sizes: dict[str, Any] = {"kv_cache_tokens": 384, "ladder": ((0, 16),)}
        return tiny_llm("quest(budget=16)", params=params, check_ranks=True, **sizes)

    yield make
    leader.end()
    for thread in threads:
        thread.join(10)


@pytest.mark.slow
def test_another_process_runs_the_same_programs(elsewhere):
    asked = jsparse.SamplingParams(max_tokens=12, temperature=0.8, seed=1)
    outs = elsewhere(1).generate(PROMPTS, asked)  # the tokens of each program are compared
    assert [len(out.outputs[0].token_ids) for out in outs] == [12] * 3


@pytest.mark.slow
def test_ranks_of_one_process_are_checked():
    """With a single process there are no messages."""
    llm = tiny_llm("dense", params=spread(tiny_params(num_layers=1), 2), check_ranks=True)
    (out,) = llm.generate([PROMPTS[0]], greedy(4))
    assert len(out.outputs[0].token_ids) == 4


def test_processes_run_one_engine_to_the_end(linked, monkeypatch):
    leader, _ = linked
    leader.works = True
    monkeypatch.setattr(processes, "link", lambda: leader)
    with pytest.raises(ValueError, match="must have only one if several processes run"):
        tiny_llm("dense", params=spread(tiny_params(num_heads=4, num_kv_heads=2), 2))


@pytest.mark.slow
def test_ranks_that_diverge_end_all(elsewhere, gone):
    with pytest.raises(EngineError, match="ranks have chosen different tokens"):
        elsewhere(1.5).generate(PROMPTS, greedy(4))
    wait_for(lambda: gone)
    assert gone[0].startswith('process 0 has failed: RuntimeError("ranks have chosen different')


ROOT = Path(__file__).parents[2]


def started(*given: dict[str, Any]) -> list[subprocess.Popen[str]]:
    """Starts two processes that run one model."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = ROOT / "tests" / "support" / "one_process.py"
    usual = dict(os.environ, JAX_PLATFORMS="cpu", PYTHONPATH=f"{ROOT}")
    usual.pop("JAX_NUM_CPU_DEVICES", None)
    both = []
    for nth, own in enumerate(given):
        environment = dict(usual)
        if "cache" in own:
            environment["JSPARSE_CACHE_DIR"] = f"{own['cache']}"
            environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        asked = json.dumps({key: value for key, value in own.items() if key != "cache"})
        command = [sys.executable, f"{program}", f"{nth}", f"{port}", asked]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        both.append(subprocess.Popen(command, env=environment, **pipes))
    return both


def of_two(*given: dict[str, Any]) -> tuple[list[int], tuple[str, ...], tuple[str, ...]]:
    """Runs two processes to completion; returns their exit codes, stdout and stderr."""
    both = started(*given)
    try:
        outs, errors = zip(*(process.communicate(timeout=240) for process in both), strict=True)
    finally:
        for process in both:
            process.kill()
    return [process.returncode for process in both], outs, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "given"),
    [
        (2, ({}, {})),
        # ranks on some of the devices, programs compiled in parallel, and different hosts
        (2, [{"devices": 2, "ranks": 2, "prepare": True, "processors": n} for n in (4, 16)]),
    ],
    ids=["all", "some"],
)
def test_two_processes_match_one_device(ranks, given):
    ends, outs, errors = of_two(*given)
    assert ends == [0, 0], errors
    params = tiny_params(num_layers=2, num_heads=2 * ranks, num_kv_heads=ranks)
    llm = jsparse.LLM(params, "quest(budget=16)", max_num_seqs=3, max_model_len=512)
    asked = jsparse.SamplingParams(max_tokens=12, temperature=0.8, seed=1, ignore_eos=True)
    wanted = [out.outputs[0].token_ids for out in llm.generate(PROMPTS, asked)]
    assert json.loads(outs[0].splitlines()[-1]) == wanted
    assert "made" not in outs[1]  # it follows process 0 from then on


@pytest.mark.slow
@pytest.mark.parametrize(
    ("killed", "by"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)]
)
def test_process_that_dies_or_hangs_ends_the_other_with_one_line(killed, by):
    both = started({"new": 450}, {"new": 450})
    with both[0], both[1]:
        try:
            assert both[0].stdout is not None
            assert "made\n" in iter(both[0].stdout.readline, "")  # process 0 has its engine
            both[killed].send_signal(by)
            _, errors = both[1 - killed].communicate(timeout=120)
        finally:
            for process in both:
                process.kill()
    (line,) = (line for line in errors.splitlines() if line.startswith("jsparse: "))
    assert both[1 - killed].returncode == 1
    assert line.startswith(f"jsparse: process {killed}")
    assert line.endswith("this process cannot continue without it")


@pytest.mark.slow
def test_processes_started_differently_name_the_difference():
    ends, _, errors = of_two({}, {"policy": "quest(budget=32)"})
    assert ends == [1, 1]
    told = "processes 0 and 1 have different policy: quest(budget=16"
    assert told in errors[0] + errors[1]


@pytest.mark.slow
def test_constants_known_to_one_process_are_made_by_all(tmp_path):
    def answers(*caches):
        policy = "twilight(all_pages(), p=0.6)"
        ends, outs, errors = of_two(*({"policy": policy, "cache": tmp_path / c} for c in caches))
        assert ends == [0, 0], errors
        return outs[0].splitlines()[-1]

    assert answers("a", "b") == answers("a", "c")
    made = [[*(tmp_path / each).rglob("*.safetensors")] for each in "abc"]
    assert [len(files) for files in made] == [1, 1, 1]
    # process 0 found its programs on disk in the second run and sent these
    kept = [[*(tmp_path / each).glob("programs/*")] for each in "abc"]
    assert kept[0]
    assert not kept[1] + kept[2]
