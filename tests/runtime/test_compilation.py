"""Tests the compilation of programs, with options for the work that a GPU runs by itself."""

import logging
import os
import sys
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from jax.stages import Lowered

from jsparse.runtime import compilation
from jsparse.runtime.compilation import inlined, program
from jsparse.runtime.program_set import ProgramKey, ProgramSet
from tests.support.serving import greedy, tiny_llm


@pytest.fixture
def unknown_option(monkeypatch):
    """Adds an option that the compiler refuses to the usual ones."""
    monkeypatch.setitem(compilation.COMPILER_OPTIONS, "no_such_option", True)


@pytest.mark.usefixtures("unknown_option")
def test_programs_are_compiled_with_the_options():
    @program(static_argnames="more")
    def add(x, more):
        return x + more

    with pytest.raises(Exception, match="no_such_option"):
        add(jnp.float32(1), more=2)
    assert inlined(add)(1, 2) == 3


def test_concurrent_programs_of_one_form_are_compiled_once(monkeypatch):
    @program(static_argnames=("named", "more"))
    def add(x, named, more=1):
        return x + more

    x = jnp.float32(1)
    first, second = (add.lower(x, named=name) for name in "ab")
    compiled, jobs = [], []
    compile_ = Lowered.compile

    def compiling(lowered, *args):
        compiled.append(lowered)
        if lowered is first:
            jobs.extend(compilation._compiled(second, of) for of in ("here", "elsewhere"))
        return compile_(lowered, *args)

    monkeypatch.setattr(Lowered, "compile", compiling)
    job = compilation._compiled(first, "here")
    # for another device it is another program, even with the same text
    assert (compiled, jobs[0]) == ([first, second], job)
    assert jobs[1] is not job
    assert job.result().program(x) == 2
    other = compilation._compiled(add.lower(x, named="a", more=2))
    assert other.result().program(x) == 3


def test_unused_argument_of_another_shape_makes_another_program(monkeypatch):
    """Models that differ in KV heads alone have the same first logits."""

    @program
    def add(x, unused):
        return x + 1

    x, others = jnp.float32(1), [np.zeros(size, np.float32) for size in (2, 3)]
    first, second = (add.lower(x, unused) for unused in others)
    jobs, compile_ = [], Lowered.compile

    def compiling(lowered, *args):
        if lowered is first:
            jobs.append(compilation._compiled(second))
        return compile_(lowered, *args)

    monkeypatch.setattr(Lowered, "compile", compiling)
    jobs.append(compilation._compiled(first))
    for job, unused in zip(jobs, reversed(others), strict=True):
        assert job.result(60).program(x, unused) == 2


@pytest.mark.usefixtures("unknown_option")
def test_error_reaches_all_waiters_for_a_program_of_one_form():
    @program(static_argnames="named")
    def add(x, named):
        return x + 1

    for job in [add.ahead(jnp.float32(1), named=name) for name in "ab"]:
        with pytest.raises(Exception, match="no_such_option"):
            job.result(60)


@pytest.mark.usefixtures("unknown_option")
def test_engine_programs_are_compiled_with_the_options():
    with pytest.raises(Exception, match="no_such_option"):
        tiny_llm().generate([[1, 2]], greedy(1))


@pytest.mark.skipif(sys.platform != "linux", reason="priorities are those of processes")
@pytest.mark.parametrize("before", [0, 15])
def test_compile_threads_yield_to_others_and_never_raise_their_priority(before, monkeypatch):
    set_to = []
    monkeypatch.setattr(os, "getpriority", lambda which, thread: before)
    monkeypatch.setattr(os, "setpriority", lambda which, thread, nice: set_to.append(nice))
    compilation._yield_to_others()
    assert set_to == [max(before, compilation.YIELDING)]

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    compilation._yield_to_others()


class Adding(ProgramSet):
    """Adds numbers; the first program waits to be traced."""

    def __init__(self):
        self.begun, self.go_on, self.traced = threading.Event(), threading.Event(), []
        programs = {"add": program(self.add, static_argnames="more")}
        super().__init__(programs, {}, lambda name, size: (jnp.float32(1),))

    def add(self, x, more):
        self.traced.append(more)
        self.begun.set()
        assert self.go_on.wait(60)
        if more == 7:
            raise ValueError("seven")
        return x + more


def test_interrupt_cancels_all_compilations():
    made = Adding()
    keys = [ProgramKey.of("add", more=more) for more in range(5)]
    made.expect(keys[:1])
    assert made.begun.wait(60)

    class Interrupting(logging.Handler):
        def emit(self, record):
            raise KeyboardInterrupt

    logger = logging.Logger("interrupting", logging.INFO)
    logger.addHandler(Interrupting())
    with pytest.raises(KeyboardInterrupt):
        made.compile(keys, logger)
    made.go_on.set()
    assert made.run(ProgramKey.of("add", more=0), jnp.float32(1)) == 1
    # a later program follows all cancelled ones
    assert made.run(ProgramKey.of("add", more=9), jnp.float32(1)) == 10
    assert made.traced == [0, 9]
    assert made.run(ProgramKey.of("add", more=3), jnp.float32(1)) == 4


def test_failed_program_is_never_ready_and_is_logged(caplog):
    made = Adding()
    key, told = ProgramKey.of("add", more=7), threading.Event()
    made.expect([key])
    made._made[key].add_done_callback(lambda job: told.set())
    made.go_on.set()
    with pytest.raises(ValueError, match="seven"):
        made.run(ProgramKey.of("add", more=7), jnp.float32(1))
    assert not made.ready(key)
    assert told.wait(60)
    assert "cannot be compiled: ValueError('seven')" in caplog.text
