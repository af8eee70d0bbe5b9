"""Tests that the commands of README and docs exist, and that those for newcomers run."""

import dataclasses
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.main import get_command

import jsparse
from jsparse.models.tokenizer import Tokenizer
from tests.support.pages import ROOT, blocks

PAGES = sorted({ROOT / "README.md", *ROOT.glob("docs/**/*.md")})
TINY = ROOT / "tests" / "fixtures" / "hf" / "llama3" / "model.gguf"
CHAT = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
UV = "python3 -m uv run "


def commands(page: Path) -> Iterator[str]:
    """Yields the commands of a page's console blocks, without their prompt."""
    for block in blocks(page, "console"):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                yield line.removeprefix("$ ")


OWN = [
    command.removeprefix(UV)
    for page in PAGES
    for command in commands(page)
    if command.removeprefix(UV).startswith("jsparse ")
]


def test_commands_of_the_docs_exist_and_have_their_options():
    from jsparse.cli.app import app

    named = set()
    for line in OWN:
        _, *words = shlex.split(line, comments=True)
        named.add(words[0])
        command: Any = get_command(app)
        while hasattr(command, "commands"):
            assert words and words[0] in command.commands, line
            command = command.commands[words.pop(0)]
        command.make_context("jsparse", words)  # raises for an unknown option or value
    assert named >= {"generate", "chat", "serve", "info", "policies", "recommend", "inspect"}
    assert named >= {"eval", "compare", "bench", "check-policy", "train-gates"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model with a chat template, in a folder."""
    params = jsparse.load(TINY)
    assert params.tokenizer is not None
    words = Tokenizer(params.tokenizer._core, chat_template=CHAT)
    folder = tmp_path_factory.mktemp("model") / "tiny"
    jsparse.save(dataclasses.replace(params, tokenizer=words), folder)
    return str(folder)


# longest contexts and texts of the tiny model; a number of samples that takes seconds
SMALLER = (("--context 4096", "--context 512"), ("--context 2048", "--context 128"))
FURTHER = {
    "eval": "--lengths 480 --samples 1",
    "recommend": "--samples 1 --policy 'streaming(sink=1, recent=8)' --only",
}


def small(line: str, model: str) -> str:
    """Returns a command for the tiny model, at its sizes."""
    line = shlex.join(shlex.split(line.removeprefix(UV), comments=True))
    for large, fits in SMALLER:
        line = line.replace(large, fits)
    named = line.replace(" smollm2", f" {model}")
    name = line.split()[1]
    if named == line and name != "policies":
        named += f" --model {model}"
    return f"{named} {FURTHER.get(name, '')}"


def serve(line: str, environment: dict[str, str], folder: Path) -> None:
    """Runs a server until it is ready, then ends it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [*shlex.split(line), "--port", f"{port}"], env=environment, cwd=folder
    )
    try:
        while True:
            assert process.poll() is None
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=60).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


PASTED = [
    pytest.param(command, id=command.removeprefix(UV).partition(" #")[0].strip()[:60])
    for page in (ROOT / "README.md", ROOT / "docs" / "quickstart.md")
    for command in commands(page)
    if command != "python3 -m pip install uv"  # .ci/run runs this one
]


@pytest.mark.slow
@pytest.mark.parametrize("line", PASTED)
def test_command_for_newcomers_runs(line, model, tmp_path):
    """As pasted in an activated environment, except for the model and its sizes."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": programs, "JSPARSE_CACHE_DIR": str(tmp_path / "cache")}
    for file in re.findall(r"--file (\S+)", line):
        assert (ROOT / file).exists()  # commands run in a clone
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text("The tides are caused by gravity. " * 8, encoding="utf-8")
    pasted = small(line, model)
    if pasted.startswith("jsparse serve "):
        serve(pasted, environment, tmp_path)
        return
    ran = subprocess.run(
        ["bash", "-c", pasted],
        input="Hello\n/quit\n",
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    # jsparse recommend exits with 1 if dense attention is best
    assert ran.returncode in ((0, 1) if " recommend " in pasted else (0,)), ran.stderr
    assert ran.stdout.strip()
    for file in re.findall(r"--html (\S+)", pasted):
        assert (tmp_path / file).exists()
