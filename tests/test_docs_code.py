"""Tests that the code of README, docs and examples runs, and that figures of policies are right."""

import ast
import dataclasses
import importlib.util
import inspect
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers

import jsparse
from jsparse.models.tokenizer import Tokenizer
from jsparse.policies import POLICIES
from jsparse.text.short_names import short_name
from tests.support.pages import ROOT, blocks
from tests.support.tiny import VOCAB, random_prompts, tiny_params

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TRAINING = ROOT / "examples" / "train_gates.py"
RAY = ROOT / "examples" / "ray_serve.py"
LEARNING = ROOT / "examples" / "rl_loop.py"


def cells(pattern: str) -> Iterator[dict[str, Any]]:
    """Yields the measured cells of committed evaluations of 8K tokens."""
    for path in sorted((ROOT / "bench" / "results").glob(pattern)):
        report = json.loads(path.read_text(encoding="utf-8"))
        yield from (each for each in report.get("cells", []) if each["length"] >= 8000)


ROW = re.compile(
    r"^\| `(.+?)`[^|]*\| ([\d.]+) % \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE
)


def test_the_readmes_table_has_the_recorded_figures():
    record = ROOT / "bench" / "results" / "recommend" / "h200.json"
    measured = {
        short_name(row["expression"]): row for row in json.loads(record.read_text("utf-8"))["rows"]
    }
    rows = ROW.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(rows) == len(measured) >= 6
    for expression, share, milliseconds, speed, kl in rows:
        own = measured[short_name(jsparse.parse_policy(expression))]
        exact = (100 * own["attended"], own["ms"], own["over_dense"], own["kl"])
        for shown, value in zip((share, milliseconds, speed, kl), exact, strict=True):
            assert abs(float(shown) - value) <= 0.51 * 10 ** -len(shown.partition(".")[2]), (
                expression
            )


def test_policies_of_choosing_can_be_pasted_and_all_measured_ones_have_a_row():
    text = (ROOT / "docs" / "choosing.md").read_text("utf-8")
    rows = [line.split("|")[2] for line in text.splitlines() if line.startswith("| ")]
    expressions = [found for row in rows[1:] for found in re.findall(r"`([^`]+)`", row)]
    built = [
        jsparse.parse_policy(each.replace("gates.safetensors", "smollm2")) for each in expressions
    ]
    assert len(built) >= len(rows) - 1 >= 15
    named = {"auto", "offloaded"}  # the records of quality lack these
    for cell in cells("quality*/h200*.json"):
        named.update(re.findall(r"\w+(?=\()", cell["policy"]))
    named &= set(POLICIES)
    assert len(named) > 20
    missing = [name for name in sorted(named) if not re.search(rf"\b{name}[(`]", text)]
    assert not missing, "add what was measured of these to docs/choosing.md"


@pytest.mark.slow
def test_docs_policy_that_drops_tokens_is_snapkv():
    _, _, block, _ = blocks(ROOT / "docs" / "own_policy.md", "python")
    written: dict[str, Any] = {}
    exec(block, written)
    prompts = random_prompts([40, 5])
    own, theirs = (
        jsparse.generate(
            tiny_params(num_layers=1),
            prompts,
            max_new_tokens=3,
            logprobs=True,
            policy=policy(budget=12, window=4),
            page_size=8,
        )
        for policy in (written["my_snapkv"], jsparse.snapkv)
    )
    for mine, other in zip(own, theirs, strict=True):
        np.testing.assert_allclose(mine.logprobs, other.logprobs, rtol=1e-5)
    attended = own[0].stats.attended_fraction
    assert attended == theirs[0].stats.attended_fraction and attended < 0.5


@pytest.mark.slow
def test_docs_wrapper_is_dense_at_first():
    *_, block = blocks(ROOT / "docs" / "own_policy.md", "python")
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
    # the last of 4 new tokens that attend to all tokens determines the fifth
    np.testing.assert_allclose(sparse.logprobs[:5], dense.logprobs[:5], rtol=1e-5)
    assert abs(sparse.logprobs[5] - dense.logprobs[5]) > 1e-3
    attended = sparse.stats.attended_fraction
    assert attended is not None and 0.5 < attended < 1


def test_papers_page_has_the_policys_parameters_and_defaults():
    for page in {*ROOT.glob("docs/papers/*.md")} - {ROOT / "docs" / "papers" / "index.md"}:
        _, _, table = page.read_text(encoding="utf-8").partition("## Parameters")
        rows = re.findall(r"^\| (`.+?) \| *(.*?) *\|", table.split("##")[0], re.MULTILINE)
        own = inspect.signature(getattr(jsparse, page.stem)).parameters
        told = [name.strip("`") for names, _ in rows for name in names.split(", ")]
        assert sorted(told) == sorted(own), page.stem
        for names, defaults in rows:
            each = re.findall(r"\(.*?\)|[^,]+", defaults)
            for name, default in zip(names.split(", "), each, strict=bool(each)):
                there = own[name.strip("`")].default
                if there not in (None, inspect.Parameter.empty):
                    assert ast.literal_eval(default.strip(" `")) == there, (page.stem, name)


@pytest.mark.slow
def test_readme_code_runs():
    [code] = blocks(ROOT / "README.md", "python")
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(ran.stdout.splitlines()) > 1


@pytest.mark.slow
def test_notebook_runs(monkeypatch, capsys):
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
def test_training_example_runs(monkeypatch, capsys):
    """On a tiny model."""
    load, tiny = jsparse.load, ROOT / "tests" / "fixtures" / "hf" / "llama3" / "model.gguf"
    monkeypatch.setattr(jsparse, "load", lambda name, **options: load(tiny, **options))
    runpy.run_path(str(TRAINING))
    assert re.search(r"3 retrieval heads of 4.*attended +\d+%", capsys.readouterr().out, re.S)


@pytest.mark.slow
@pytest.mark.parametrize(
    "example",
    [path for path in EXAMPLES if path not in (TRAINING, LEARNING)],
    ids=lambda path: path.stem,
)
def test_examples_run(example):
    if example == RAY and importlib.util.find_spec("ray") is None:
        pytest.skip("needs the package ray[serve]")
    ran = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=True)
    assert re.search(r"attended +\d+ ?%", ran.stdout)


@pytest.mark.slow
def test_jitted_generation_of_the_docs_is_generate():
    (code,) = (each for each in blocks(ROOT / "docs" / "models.md", "python") if "prefill" in each)
    written: dict[str, Any] = {"jsparse": jsparse, "jax": jax, "params": jsparse.load("smollm2")}
    exec(code, written)
    policy, text = "quest(budget=1024)", "Gravity is"
    out = jsparse.generate(written["params"], text, policy=policy, max_new_tokens=32)
    assert written["ids"].tolist() == [out.token_ids]


@pytest.mark.slow
def test_training_loop_learns(capsys):
    written = runpy.run_path(str(LEARNING))
    written["main"].__globals__["STEPS"] = 7
    written["main"]()
    rewards = [float(found) for found in re.findall(r"reward ([\d.]+)", capsys.readouterr().out)]
    assert len(rewards) == 7 and min(rewards[-2:]) > max(rewards[:2])


@pytest.mark.slow
def test_serving_code_runs(tmp_path, capsys):
    """On a tiny model of words, with meaningless text."""
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
