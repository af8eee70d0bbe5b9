"""Tests the short names of policies for display."""

import os
import subprocess
import sys

from jsparse.policies.expressions import parse
from jsparse.text.short_names import method_name, short_name
from tests.support.policy_table import TABLE


def test_short_name_builds_the_same_policy():
    for expression in TABLE:
        policy = parse(expression)
        assert parse(short_name(policy)) is policy, expression


def test_short_name_leaves_defaults_out():
    for expression, short in [
        ("quest(budget=64)", "quest(budget=64)"),
        ("quest", "quest(budget=1024)"),
        ("twilight(quest(64, slack=1.0), p=0.9)", "twilight(quest(budget=64, slack=1.0), p=0.9)"),
        ("dense_layers(streaming(4, recent=60))", "dense_layers(streaming(recent=60))"),
        ("lychee_decode('smollm2', 32)", "lychee_decode('smollm2', value=32)"),
        ("snapkv(pool=5, pooling='max')", "snapkv(budget=1024, pooling='max')"),
    ]:
        assert short_name(parse(expression)) == short, expression


def test_method_name_leaves_amounts_out():
    for expression, method in [
        ("quest(64)", "quest"),
        ("quest(64, slack=1.0)", "quest(slack=1.0)"),
        ("twilight(quest(64, slack=1.0), p=0.9)", "twilight(quest(slack=1.0))"),
        ("streaming(sink=8, recent=60)", "streaming(sink=8)"),
        ("lychee_decode('smollm2', 32)", "lychee_decode('smollm2')"),
        ("dense", "dense"),
    ]:
        assert method_name(parse(expression).name) == method, expression
    assert method_name("own.py:mine(budget=3)") == "own.py:mine(budget=3)"


def test_other_names_are_unchanged():
    for name in [
        "dense",
        "folder/own.py:mine",
        "module:mine(quest(budget=1024))",
        "lru(sink=4)",
        "(" * 999,
    ]:
        assert short_name(name) == name, name


def test_default_of_another_type_is_shown():
    assert short_name("streaming(sink=4.0)") == "streaming(sink=4.0)"
    assert short_name("hard_kv(merge=1)") == "hard_kv(merge=1)"


def test_help_needs_no_jax(tmp_path):
    (tmp_path / "jax.py").write_text("raise ImportError('jax was imported')")
    ran = subprocess.run(
        [sys.executable, "-m", "jsparse", "--help"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
