"""Tests how programs are compiled: with options that say what a GPU runs by itself."""

import jax.numpy as jnp
import pytest
from jax.stages import Lowered
from serving import greedy, tiny_llm

from jsparse.runtime import compilation
from jsparse.runtime.compilation import inlined, program


@pytest.fixture
def unknown_option(monkeypatch):
    """An option that the compiler refuses, beside the usual ones."""
    monkeypatch.setitem(compilation.COMPILER_OPTIONS, "no_such_option", True)


def test_loops_and_branches_are_among_what_a_gpu_runs_as_a_graph():
    (kinds,) = compilation.COMPILER_OPTIONS.values()
    assert {"FUSION", "CUBLAS", "WHILE", "CONDITIONAL"} <= set(kinds.split(","))


@pytest.mark.usefixtures("unknown_option")
def test_programs_are_compiled_with_the_options():
    @program(static_argnames="more")
    def add(x, more):
        return x + more

    with pytest.raises(Exception, match="no_such_option"):
        add(jnp.float32(1), more=2)
    assert inlined(add)(1, 2) == 3


def test_programs_of_one_form_that_are_wanted_at_once_are_compiled_once(monkeypatch):
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
            jobs.append(compilation._compiled(second))
        return compile_(lowered, *args)

    monkeypatch.setattr(Lowered, "compile", compiling)
    job = compilation._compiled(first)
    assert (compiled, jobs) == ([first], [job])
    assert job.result().program(x) == 2
    other = compilation._compiled(add.lower(x, named="a", more=2))
    assert other.result().program(x) == 3


@pytest.mark.usefixtures("unknown_option")
def test_who_waits_for_a_program_of_one_form_gets_its_error():
    @program(static_argnames="named")
    def add(x, named):
        return x + 1

    for job in [add.ahead(jnp.float32(1), named=name) for name in "ab"]:
        with pytest.raises(Exception, match="no_such_option"):
            job.result(60)


@pytest.mark.usefixtures("unknown_option")
def test_programs_of_an_engine_are_compiled_with_the_options():
    with pytest.raises(Exception, match="no_such_option"):
        tiny_llm().generate([[1, 2]], greedy(1))
