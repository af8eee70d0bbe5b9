"""Tests the output of commands before they load a model: help, and errors in options."""

import io
import os
import subprocess
import sys

import pytest
from typer import Typer
from typer.testing import CliRunner

import jsparse
from jsparse.cli import console
from jsparse.cli.app import app
from jsparse.cli.options import ModelOption, takes_model

pytestmark = pytest.mark.pure


def run(*args, stdin=None):
    return CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)


def test_mistake_is_one_line_and_exit_code_2():
    for args, said in [
        ([], "none was given"),
        (["x", "--file", "y"], "both were given"),
        (["--file", "no-such.txt"], "'no-such.txt' cannot be read"),
        (["x", "--logprobs"], "--json"),
    ]:
        ran = run("generate", *args)
        assert (ran.exit_code, ran.stdout) == (2, ""), said
        assert ran.stderr.startswith("error: ") and ran.stderr.count("\n") == 1, said
        assert said in ran.stderr
    for args in (["generate", "x", "--seed", "q"], ["generate", "x", "--dtype", "int8"], ["nope"]):
        ran = run(*args)
        assert (ran.exit_code, ran.stdout) == (2, ""), args
        assert "Traceback" not in ran.stderr


def test_version_and_help():
    assert run("--version").stdout == f"jsparse {jsparse.__version__}\n"
    for command in ("generate", "chat", "compare", "info", "policies"):
        assert "Example: jsparse" in run(command, "--help").stdout


# with the options that each command requires
TAKE_A_MODEL = {
    "chat": [],
    "serve": [],
    "info": [],
    "eval": [],
    "train-gates": ["--out", "x"],
    "train-indexer": ["--out", "x"],
    "calibrate-channels": ["--text", "x"],
    "calibrate-heads": [],
    "bench throughput": [],
    "bench latency": [],
}
OTHERS = ("", "generate", "inspect", "compare", "policies", "check-policy", "bench")


def test_two_models_are_refused():
    for command, needed in TAKE_A_MODEL.items():
        ran = run(*command.split(), "a", "--model", "b", *needed)
        assert (ran.exit_code, ran.stdout) == (2, ""), command
        assert ran.stderr == (
            "error: --model 'b': must not differ from the argument, 'a'; one is enough\n"
        ), command


def test_files_that_cannot_be_written_are_refused_first(tmp_path):
    text = ["--text", "x"]
    for command in ("train-indexer", "calibrate-channels", "calibrate-heads"):
        needed = text if command == "calibrate-channels" else []
        for out, rule in (
            (tmp_path, "must be a file, not a folder"),
            (tmp_path / "no" / "file", "must be in an existing folder"),
        ):
            ran = run(command, "no-model", *needed, "--out", out)
            assert (ran.exit_code, ran.stderr) == (2, f"error: --out {str(out)!r}: {rule}\n")


def test_model_is_an_argument_or_an_option():
    seen = []
    for given, taken in [
        ([], "smollm2"),
        (["a"], "a"),
        (["--model", "a"], "a"),
        (["a", "--model", "a", "--context", "7"], "a"),
    ]:

        def command(context: int = 3, model: ModelOption = "smollm2") -> None:
            seen.append((model, context))

        alone = Typer()
        alone.command()(takes_model(command))
        assert CliRunner().invoke(alone, given).exit_code == 0, given
        assert seen.pop() == (taken, 7 if "7" in given else 3), given


def test_help_shows_no_internal_types():
    for command in [*TAKE_A_MODEL, *OTHERS]:
        shown = run(*command.split(), "--help").stdout
        assert "Usage: jsparse" in shown or "Usage: root" in shown, command
        assert "<bool>" not in shown, command
        assert "list[" not in shown, command
        assert "{model}" not in shown, command


@pytest.mark.slow
def test_shell_completes_policies(monkeypatch):
    assert "--install-completion" in run("--help").stdout
    assert "--install-completion" not in run("bench", "--help").stdout
    words = "jsparse chat --policy qu"
    complete = {"_JSPARSE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "3"}
    code = "import sys, jsparse.cli.app as a; a.main(); assert 'jax' not in sys.modules"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | complete,
    )
    assert ran.stdout.split() == ["quest", "quest_chunks"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_bars_and_prompt_are_shown_only_on_terminals(monkeypatch):
    for stdout, shown in [(Terminal, True), (io.StringIO, False)]:
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
        assert ("load" in err.getvalue(), "prefill" in err.getvalue()) == (shown, shown), stdout
        assert "decode" not in err.getvalue(), stdout
        assert ("the prompt" in out.getvalue()) == shown, stdout
        assert out.getvalue().endswith("made\n"), stdout


def test_progress_bar_is_not_full_while_programs_compile(monkeypatch):
    for phase, then in [("load", "compile"), ("decode", "decode")]:
        monkeypatch.setenv("TERM", "xterm")
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, Terminal())
        bars = console.Bars()
        bars.generate(phase, 1, 2)
        bars.generate(phase, 2, 2)
        bars.close()
        assert then in sys.stderr.getvalue(), phase
        assert ("compile" in sys.stderr.getvalue()) == (then == "compile"), phase


def test_statistics_wrap_between_their_parts():
    for width in [40, 80, 200]:
        parts = [
            "128 tokens, cut at --max-new-tokens",
            "25.4 tok/s",
            "attended 100.0%",
            "first token after 3.14 s",
            "policy twilight(quest(budget=1024), p=0.9)",
        ]
        lines = console.in_lines(parts, " · ", width)
        assert " · ".join(lines) == " · ".join(parts), width
        assert all(len(line) <= width or line in parts for line in lines), width
        assert len(lines) == {40: 4, 80: 2, 200: 1}[width], width
