"""Tests `jsparse eval` on a tiny random model: its files, resumed runs, and refusals."""

import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jsparse.cli import evaluate
from jsparse.cli.app import app
from jsparse.evaluation import evaluators
from jsparse.evaluation.plan import Part, Progress
from tests.support.marks import slow_except

TINY = Path(__file__).parents[1] / "fixtures" / "hf" / "llama3" / "model.gguf"
SINK = "streaming(sink=1, recent=1)"


def run(*args):
    return CliRunner().invoke(app, ["eval", *map(str, args)])


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("the cat sat on the mat and the dog ran to the red house " * 40)
    args = ["--model", TINY, "--text", text, "--lengths", "32"]
    args += ["--steps", "4", "--samples", "3", "--batch", "2"]
    return [*args, "--policy", SINK]


@pytest.mark.slow
def test_writes_every_sample_and_the_page(common, tmp_path):
    out = tmp_path / "out.json"
    page = tmp_path / "report.html"
    given = ("--json", out, "--report", page)
    done = run(*common, "--tasks", "kl,ppl,attention", *given)
    assert done.exit_code == 0, done.output
    # both plots are embedded
    assert page.read_text().count('"panels": ') == 2
    assert "KL" in done.output
    assert "recall" in done.output
    report = json.loads(out.read_text())
    cells = {(cell["policy"], cell["task"]): cell for cell in report["cells"]}
    assert len(cells) == 6
    assert all(len(cell["samples"]) == 3 for cell in cells.values())
    dense, sparse = (cells[policy, "kl"]["metrics"]["kl"]["mean"] for policy in ("dense()", SINK))
    assert abs(dense) < 1e-6 < sparse
    assert cells["dense()", "attention"]["metrics"]["recall"]["mean"] == 1.0
    assert cells[SINK, "attention"]["metrics"]["attended"]["mean"] < 0.1
    assert not list(tmp_path.glob("*.jsonl"))


@pytest.mark.slow
def test_samples_name_the_text_of_a_folder(common, tmp_path):
    folder, out = tmp_path / "texts", tmp_path / "out.json"
    folder.mkdir()
    for name, word in (("b", "house "), ("a", "dog ")):
        (folder / f"{name}.txt").write_text(word * 200)
    done = run(*common, "--tasks", "ppl", "--text", folder, "--json", out)
    assert done.exit_code == 0, done.output
    for cell in json.loads(out.read_text())["cells"]:
        assert [sample["meta"]["source"] for sample in cell["samples"]] == ["a", "b", "a"]


def test_texts_take_turns():
    texts = {"a": range(100), "b": range(200, 300)}
    assert evaluators.source(texts, 3) == {"source": "b"}
    assert evaluators.source({"a": range(100)}, 3) == {}
    for index in range(6):
        first, *_, last = evaluators.excerpt(texts, 20, 4, index)
        assert last - first == 14
        assert (first >= 200) == (index % 2 == 1)


def test_folder_without_texts_is_refused(common, tmp_path):
    refused = run(*common, "--tasks", "kl", "--text", tmp_path)
    assert refused.exit_code == 2
    assert "must be a text file, or a folder with .txt files" in refused.stderr


def test_only_report_needs_matplotlib(common, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(evaluate, "carry_out", lambda *_, **__: 1 / 0)
    refused = run(*common, "--tasks", "kl", "--report", tmp_path / "page.html")
    assert refused.exit_code == 2
    assert "--report needs matplotlib" in refused.stderr
    assert isinstance(run(*common, "--tasks", "kl").exception, ZeroDivisionError)


@pytest.fixture(scope="module", params=slow_except(["empty page", "page"], "empty page"))
def by_step(common, tmp_path_factory, request):
    """The result of an evaluation of many steps, its file and its page."""
    folder = tmp_path_factory.mktemp("by_step")
    out, page = folder / "out.json", folder / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluators, "STEP_BLOCK", 3)
        if request.param == "empty page":  # test_plots.py draws plots
            patch.setattr(evaluate, "write_page", lambda report, file: file.touch())
        patch.setattr(evaluate, "show", lambda report: print(out.exists(), page.exists()))
        done = run(*common, "--tasks", "kl,ppl", "--json", out, "--report", page)
    return done, out, page


def test_files_are_written_before_tables_and_named(by_step):
    done, out, page = by_step
    assert done.stdout == "True True\n"
    lines = done.stderr.splitlines()
    for line, task, count in zip(lines, ("kl", "ppl"), (6, 12), strict=False):
        assert line.startswith(f"{task} at 32 tokens: 6 samples in ")
        assert line.endswith(f"({count} of 12 in all)")
    assert lines[2:] == [f"wrote {out}", f"wrote {page}"]


def test_progress_lines_estimate_time_after_the_first_long_batch(capsys, monkeypatch):
    seconds = iter([10, 40, 70, 90, 100, 101, 105])
    monkeypatch.setattr(evaluate.time, "monotonic", lambda: float(next(seconds)))
    long, short = (Part((task,), 512, 4, lambda *_: []) for task in ("kl", "passkey"))
    lines = evaluate._Lines()
    for done in (0, 2, 6, 12):
        lines(Progress(done, 16, long, done, 12))
    for done in (0, 2, 4):
        lines(Progress(12 + done, 16, short, done, 4))
    assert capsys.readouterr().err.splitlines() == [
        "kl at 512 tokens: 2 of 12 samples in 30 s, compilation included; the rest in at most "
        "about 3 min (2 of 16 in all)",
        "kl at 512 tokens: 12 samples in 80 s (12 of 16 in all)",
        "passkey at 512 tokens: 4 samples in 5 s (16 of 16 in all)",
    ]


def test_questions_get_up_to_max_new_tokens(common, tmp_path):
    rows = [{"question": "the cat sat", "answer": 1}, {"question": "the dog ran", "answer": "no"}]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    args = ["--tasks", "questions", "--files", tmp_path, "--max-new-tokens", 9]
    done = run(*common, *args, "--json", tmp_path / "out.json")
    assert done.exit_code == 0, done.output
    assert "score %" in done.output and "new tokens" in done.output and "cut off %" in done.output
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["settings"]["max_new_tokens"] == 9
    made = [sample["values"] for cell in report["cells"] for sample in cell["samples"]]
    assert len(made) == 4  # of two policies
    assert max(values["new_tokens"] for values in made) == 9


def test_mistakes_are_one_line(common):
    for args, said in [
        (["--tasks", "kl,nonsense"], "'nonsense'"),
        (["--tasks", "kl,kl"], "'kl'"),
        (["--tasks", "kl", "--lengths", "32,many"], "lengths='32,many'"),
        (["--tasks", "kl", "--lengths", "5"], "length=5: must be at least steps + 2 = 6"),
        (["--tasks", "kl", "--lengths", "100000"], "length=100000: must be at most"),
        (["--tasks", "kl", "--samples", "0"], "samples=0: must be at least 1"),
        (["--tasks", "kl", "--resume"], "--resume needs --json"),
        (["--tasks", "ppl,passkey", "--yardstick"], "must have kl among them"),
        (["--tasks", "kl", "--policy", "nobody()"], "nobody"),
        (["--tasks", "qa_1", "--files", "nowhere"], "squad.json"),
        (["--tasks", "questions"], "needs questions.jsonl"),
        (["--tasks", "questions", "--max-new-tokens", "0"], "max_new_tokens=0: must be at least 1"),
    ]:
        done = run(*common, *args)
        assert done.exit_code == 2, args
        assert done.stderr.startswith("error:"), args
        assert said in done.stderr, args
        assert "Traceback" not in done.output, args
