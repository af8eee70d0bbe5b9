"""Tests how programs are compiled: with options that say what a GPU runs by itself."""

import jax.numpy as jnp
import pytest
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


@pytest.mark.usefixtures("unknown_option")
def test_programs_of_an_engine_are_compiled_with_the_options():
    with pytest.raises(Exception, match="no_such_option"):
        tiny_llm().generate([[1, 2]], greedy(1))
