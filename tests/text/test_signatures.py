"""Tests what is read of policies from their source alone, and the names that people read."""

import inspect
import os
import subprocess
import sys

import pytest
from policy_table import TABLE

from jsparse.policies import POLICIES
from jsparse.policies.expressions import parse
from jsparse.text import signatures
from jsparse.text.signatures import REQUIRED, registered, short_name


def test_signatures_are_those_that_python_has():
    assert list(registered()) == list(POLICIES)
    for name, build in POLICIES.items():
        parameters = inspect.signature(build).parameters.values()
        wanted = {p.name: REQUIRED if p.default is p.empty else p.default for p in parameters}
        assert repr(dict(registered()[name].parameters)) == repr(wanted), name
        assert (
            (inspect.getdoc(build) or "").replace("\n", " ").startswith(registered()[name].summary)
        )


@pytest.mark.parametrize("expression", TABLE)
def test_a_short_name_builds_the_same_policy(expression):
    policy = parse(expression)
    assert parse(short_name(policy)) is policy


@pytest.mark.parametrize(
    ("expression", "short"),
    [
        ("quest(budget=64)", "quest(budget=64)"),
        ("quest", "quest(budget=1024)"),
        ("twilight(quest(64, slack=1.0), p=0.9)", "twilight(quest(budget=64, slack=1.0), p=0.9)"),
        ("dense_layers(streaming(4, recent=60))", "dense_layers(streaming(recent=60))"),
        ("lychee_decode('smollm2', 32)", "lychee_decode('smollm2', value=32)"),
        ("snapkv(pool=5, pooling='max')", "snapkv(budget=1024, pooling='max')"),
    ],
)
def test_a_short_name_leaves_defaults_out(expression, short):
    assert short_name(parse(expression)) == short


@pytest.mark.parametrize(
    "name",
    ["dense", "folder/own.py:mine", "module:mine(quest(budget=1024))", "lru(sink=4)", "(" * 999],
)
def test_other_names_stay_as_they_are(name):
    assert short_name(name) == name


def test_a_default_of_another_type_is_shown():
    assert short_name("streaming(sink=4.0)") == "streaming(sink=4.0)"
    assert short_name("hard_kv(merge=1)") == "hard_kv(merge=1)"


def test_a_default_that_must_be_computed_is_refused_by_name(tmp_path, monkeypatch):
    (tmp_path / "m.py").write_text("N = 3\ndef f(a, b=N, c=N + 1):\n    pass\n")
    monkeypatch.setattr(signatures, "PACKAGE", tmp_path)
    with pytest.raises(ValueError, match=r"jsparse.m.f: the default N \+ 1 must be a literal"):
        signatures._signature("jsparse.m", "f")


@pytest.mark.parametrize("command", ["policies", "--help"])
def test_the_lists_need_no_jax(command, tmp_path):
    (tmp_path / "jax.py").write_text("raise ImportError('jax was imported')")
    ran = subprocess.run(
        [sys.executable, "-m", "jsparse", command],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
