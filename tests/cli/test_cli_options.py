"""Tests what the command says before it loads a model: its help, and mistakes in its options."""

import io
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import jsparse
from jsparse.cli import console
from jsparse.cli.app import app

pytestmark = pytest.mark.pure


def run(*args, stdin=None):
    return CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)


MISTAKES = {
    "no prompt": ([], "none was given"),
    "two prompts": (["x", "--file", "y"], "both were given"),
    "no such prompt": (["--file", "no-such.txt"], "'no-such.txt' cannot be read"),
    "logprobs": (["x", "--logprobs"], "--json"),
}


@pytest.mark.parametrize(("args", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(args, said):
    ran = run("generate", *args)
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert ran.stderr.startswith("error: ")
    assert ran.stderr.count("\n") == 1
    assert said in ran.stderr


@pytest.mark.parametrize(
    "args", [["generate", "x", "--seed", "q"], ["generate", "x", "--dtype", "int8"], ["nope"]]
)
def test_usage_errors_have_exit_code_2(args):
    ran = run(*args)
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert "Traceback" not in ran.stderr


def test_a_file_that_is_not_text_is_refused(tmp_path):
    file = tmp_path / "binary"
    file.write_bytes(b"\xff\xfe\x00")
    ran = run("generate", "--file", file)
    assert ran.exit_code == 2
    assert "is not UTF-8" in ran.stderr


def test_version_and_help():
    assert run("--version").stdout == f"jsparse {jsparse.__version__}\n"
    for command in ("generate", "chat", "info", "policies"):
        assert "Example: jsparse" in run(command, "--help").stdout


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("stdout", "shown"), [(Terminal, True), (io.StringIO, False)])
def test_bars_and_prompt_are_for_terminals(stdout, shown, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out, err = stdout(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    bars = console.Bars()
    output = console.TextOutput(bars, "the prompt")
    bars.load(1, 2)
    bars.prefill("prefill", 3, 4)
    output("made")
    bars.prefill("decode", 1, 2)
    output.close()
    assert ("load" in err.getvalue(), "prefill" in err.getvalue()) == (shown, shown)
    assert "decode" not in err.getvalue()
    assert ("the prompt" in out.getvalue()) == shown
    assert out.getvalue().endswith("made\n")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_statistics_break_between_their_parts(width):
    parts = [
        "128 tokens, cut at --max-new-tokens",
        "25.4 tok/s",
        "attended 100.0%",
        "first token after 3.14 s",
        "policy twilight(quest(budget=1024), p=0.9)",
    ]
    lines = console.in_lines(parts, " · ", width)
    assert " · ".join(lines) == " · ".join(parts)
    assert all(len(line) <= width or line in parts for line in lines)
    assert len(lines) == {40: 4, 80: 2, 200: 1}[width]


def test_help_does_not_wait_for_the_model_code():
    code = (
        "import sys, jsparse.cli; "
        "print([m for m in sys.modules if m.startswith('orbax') or m == 'tensorstore'])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert ran.stdout.strip() == "[]"
