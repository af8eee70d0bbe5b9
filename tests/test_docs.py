"""Tests that links lead somewhere, and that the README's code and the examples run."""

import ast
import dataclasses
import inspect
import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tiny import VOCAB, random_prompts, tiny_params

import jsparse
from jsparse.models.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "bench" / "README.md"})
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TRAINING = ROOT / "examples" / "train_gates.py"
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def blocks(page: Path, language: str) -> list[str]:
    """Returns the blocks of code in a language."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), (target, anchor)


def test_the_api_reference_has_every_public_name():
    names = (ROOT / "jsparse" / "__init__.pyi").read_text(encoding="utf-8")
    public = {".".join(found) for found in re.findall(r"^from (\S+) import (\w+)", names, re.M)}
    shown = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.M)
    assert public <= set(shown)
    assert len(shown) == len(set(shown))


def test_the_readme_is_short_and_has_its_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    first, second = blocks(ROOT / "README.md", "sh")
    assert "jsparse generate" in first
    assert second.splitlines()[-1] == "python3 -m uv run pytest"


def test_the_policy_of_the_docs_is_that_of_the_example():
    block, _ = blocks(ROOT / "docs" / "own_policy.md", "python")
    _, _, builder = block.partition("@builder")
    assert builder
    assert f"@builder{builder}" in (ROOT / "examples" / "own_policy.py").read_text()


def test_the_wrapper_of_the_docs_is_dense_at_first():
    _, block = blocks(ROOT / "docs" / "own_policy.md", "python")
    written: dict[str, Any] = {}
    exec(block, written)
    wrapped = written["dense_first"](jsparse.streaming(sink=1, recent=3), tokens=4)
    (prompt,) = random_prompts([20])
    dense, sparse = (
        jsparse.generate(
            tiny_params(num_layers=1),
            prompt,
            max_new_tokens=9,
            logprobs=True,
            policy=policy,
            page_size=8,
        )
        for policy in ("dense", wrapped)
    )
    # the last of 4 new tokens that attend to everything chooses the fifth
    np.testing.assert_allclose(sparse.logprobs[:5], dense.logprobs[:5], rtol=1e-5)
    assert abs(sparse.logprobs[5] - dense.logprobs[5]) > 1e-3
    attended = sparse.stats.attended_fraction
    assert attended is not None and 0.5 < attended < 1


def choices() -> list[str]:
    """Returns the rows of the table of docs/choosing.md that have figures."""
    rows = re.findall(r"^\| .+$", (ROOT / "docs" / "choosing.md").read_text("utf-8"), re.MULTILINE)
    return [row for row in rows if "figures](" in row]


@pytest.mark.parametrize("row", choices(), ids=lambda row: row.split("|")[1].strip()[:40])
def test_figures_of_choosing_stand_on_the_pages_they_cite(row):
    cited = " ".join((ROOT / "docs" / page).read_text("utf-8") for page, _ in LINK.findall(row))
    prose = re.sub(r"`[^`]+`", "", row)
    missing = [
        figure
        for figure in re.findall(r"\d+\.\d+", prose)
        if not re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", cited)
    ]
    assert not missing


def test_figures_are_drawn_from_their_source():
    drawing = runpy.run_path(str(ROOT / "docs" / "figures" / "draw.py"))
    sources = sorted((ROOT / "docs" / "figures").glob("*.toml"))
    assert sources
    for source in sources:
        drawn = (ROOT / "docs" / "images" / f"{source.stem}.svg").read_text("utf-8")
        assert drawn == drawing["draw"](source.read_text("utf-8"))


@pytest.mark.slow
def test_the_code_of_the_quickstart_runs():
    page = ROOT / "docs" / "quickstart.md"
    session = "\n".join(blocks(page, "python"))
    ran = subprocess.run(
        [sys.executable, "-c", session], capture_output=True, text=True, check=True
    )
    assert len(re.findall(r"attended to +\d+%", ran.stdout)) == 3
    commands = [line for block in blocks(page, "console") for line in block.splitlines()]
    commands = [line.removeprefix("$ ") for line in commands if line.startswith("$ jsparse ")]
    assert len(commands) == 3
    for command in commands:
        words = [str(Path(sys.executable).with_name("jsparse")), *shlex.split(command)[1:]]
        assert subprocess.run(words, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "page",
    sorted({*ROOT.glob("docs/papers/*.md")} - {ROOT / "docs" / "papers" / "index.md"}),
    ids=lambda page: page.stem,
)
def test_a_paper_s_page_has_the_policy_s_parameters_and_defaults(page):
    _, _, table = page.read_text(encoding="utf-8").partition("## Parameters")
    rows = re.findall(r"^\| (`.+?) \| *(.*?) *\|", table.split("##")[0], re.MULTILINE)
    own = inspect.signature(getattr(jsparse, page.stem)).parameters
    told = [name.strip("`") for names, _ in rows for name in names.split(", ")]
    assert sorted(told) == sorted(own)
    for names, defaults in rows:
        each = re.findall(r"\(.*?\)|[^,]+", defaults)
        for name, default in zip(names.split(", "), each, strict=bool(each)):
            there = own[name.strip("`")].default
            if there not in (None, inspect.Parameter.empty):
                assert ast.literal_eval(default.strip(" `")) == there, name


@pytest.mark.slow
def test_the_readmes_code_runs():
    [code] = blocks(ROOT / "README.md", "python")
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(ran.stdout.splitlines()) > 1


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch, capsys):
    """On a tiny model; its committed outputs are SmolLM2's."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    words = tokenizers.models.WordLevel({f"w{nth}": nth for nth in range(VOCAB)}, unk_token="w0")
    core = tokenizers.Tokenizer(words)
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tiny = dataclasses.replace(tiny_params(), tokenizer=Tokenizer(core))
    monkeypatch.setattr(jsparse, "load", lambda name: tiny)
    monkeypatch.setattr(pyplot, "show", lambda: pyplot.close("all"))
    notebook = json.loads((ROOT / "examples" / "what_policies_read.ipynb").read_text())
    scope: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] or "import" in cell["source"][0]
            exec("".join(cell["source"]), scope)
    assert len(re.findall(r"KL +-?[\d.]+ +[\d.]+ MB", capsys.readouterr().out)) == 5


@pytest.mark.slow
def test_the_example_of_a_training_runs(monkeypatch, capsys):
    """On a tiny model."""
    load, tiny = jsparse.load, ROOT / "tests" / "fixtures" / "hf" / "llama3" / "model.gguf"
    monkeypatch.setattr(jsparse, "load", lambda name: load(tiny))
    runpy.run_path(str(TRAINING))
    assert re.search(r"3 retrieval heads of 4.*attended +\d+%", capsys.readouterr().out, re.S)


@pytest.mark.slow
@pytest.mark.parametrize(
    "example", [path for path in EXAMPLES if path != TRAINING], ids=lambda path: path.stem
)
def test_examples_run(example):
    ran = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=True)
    assert re.search(r"attended +\d+ ?%", ran.stdout)


@pytest.mark.slow
def test_the_code_on_serving_runs(tmp_path, capsys):
    """On a tiny model of words, whose answers mean nothing."""
    core = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{nth}": nth for nth in range(VOCAB)}, unk_token="w0")
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words = Tokenizer(core, chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
    jsparse.save(dataclasses.replace(tiny_params(num_layers=2), tokenizer=words), tmp_path / "tiny")
    code, streaming = blocks(ROOT / "docs" / "serving.md", "python")
    body = "".join(f"    {line}\n" for line in streaming.splitlines())
    wrapped = f"import asyncio, jsparse\nasync def main():\n{body}\nasyncio.run(main())\n"
    for source in (code, wrapped):
        small = source.replace('"smollm2"', repr(str(tmp_path / "tiny"))).replace("2048", "256")
        assert "smollm2" not in small
        exec(small, {})
        assert capsys.readouterr().out.strip()
