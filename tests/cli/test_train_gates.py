"""Tests `jsparse train-gates` on a tiny random model: output, files, settings and refusals."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jsparse.cli import train_gates as command
from jsparse.cli.app import app
from jsparse.policies.head_gates import load
from jsparse.runtime.compilation import keep_compilations
from jsparse.train import trainer

# 2 layers, 2 KV heads, 512 tokens
TINY = str(Path(__file__).parents[1] / "fixtures" / "hf" / "llama3" / "model.gguf")
TEXT = "the cat sat on the mat and the dog ran to the red house. " * 20


def run(*args):
    return CliRunner().invoke(app, ["train-gates", "--model", TINY, *map(str, args)])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT)
    return file


def small(text):
    """Options of a training run that takes seconds."""
    keys = ["--min-length", 160, "--max-length", 180, "--needles", 1, "--words", 1, "--asked", 1]
    return ["--target", 3, "--steps", 3, "--seeds", 2, "--held-out", 1, "--text", text, *keys]


NUMBERS = {
    "active": 3.25, "retrieval_heads": 3, "above_half": 3, "grey": 0, "distance_of_mean_gates": 0.3,
}  # fmt: skip


def made_up(*far):
    """A record of a training run with these distances of hard gates."""
    seeds = [NUMBERS | {"distance_of_hard_gates": each} for each in far]
    return {"seeds": seeds, "distance_of_layer_0_alone": 0.7625, "seconds": 5.0}


def test_gates_at_the_smallest_distance_are_named(tmp_path, text, monkeypatch):
    monkeypatch.setattr(command, "_draw", lambda folder: None)
    for nth, (far, policy, sets) in enumerate(
        [
            ((0.2, 0.1), "lychee_decode", "handed_on"),
            ((0.1, 0.2), "duo_attention", "streaming"),
        ]
    ):
        out = tmp_path / f"{nth}"
        monkeypatch.setattr(trainer.Trainer, "run", lambda *_, far=far, **__: made_up(*far))
        ran = run("--out", out, *small(text), "--sets", sets)
        assert (ran.exit_code, ran.stderr) == (0, ""), far
        told = ran.stdout.splitlines()
        assert all(str(each) in ran.stdout for each in far), far
        assert "the distance is 0.7625." in told[-2]
        assert told[-1] == f"{policy}({str(out / f'gates_{1 - nth}.safetensors')!r})"


def test_gates_that_keep_half_of_the_distance_are_reported_as_undertrained(capsys):
    for least, short in [(0.1, False), (0.38, False), (0.39, True)]:
        command._show(made_up(0.7, least))
        told = capsys.readouterr().out
        assert command.LEGEND in told, least
        assert (f"These gates find little: at {least} they leave" in told) == short, least
        assert ("Train with more --steps" in told) == short, least


@pytest.mark.slow
def test_writes_gates_record_log_and_plots(text, tmp_path):
    keep_compilations()
    out = tmp_path / "run"
    assert run("--out", out, *small(text)).exit_code == 0
    names = {"settings.json", "log.jsonl", "checkpoints", "record.json"}
    for i in (0, 1):
        names |= {f"gates_{i}.safetensors", f"gates_{i}.png", f"densities_{i}.png"}
        gates = load(str(out / f"gates_{i}.safetensors"))
        assert (gates.retrieval.shape, gates.retrieval.sum()) == ((2, 2), 3)
        assert gates.record["data"]["source"] == "passkeys"
    assert {path.name for path in out.iterdir()} == names


def caught(monkeypatch, *args):
    """Captures the trainer that a command builds and the arguments of its run."""
    made = []
    monkeypatch.setattr(
        trainer.Trainer,
        "run",
        lambda self, report, **options: made.append((self, options)) or 1 / 0,
    )
    ran = run(*args)
    assert isinstance(ran.exception, ZeroDivisionError), (
        ran.output
    )  # errors other than the user's keep their traceback
    return made[0]


def test_every_option_reaches_the_training(monkeypatch, tmp_path, text):
    given = {
        "family": "hard_concrete", "penalty": "exponential", "penalty_rate": 0.25,
        "penalty_start": 3.0, "damping": 1.5, "steps": 7, "anneal": 0.5, "batch": 8, "rate": 0.02,
        "keep": 0.4, "match": "hidden", "seeds": 3, "held_out": 5, "sets": "refreshed",
    }  # fmt: skip
    flags = [x for name, value in given.items() for x in (f"--{name.replace('_', '-')}", value)]
    keys = {"min_length": 170, "max_length": 200, "needles": 2, "words": 1, "asked": 1, "seed": 9}
    flags += [x for name, value in keys.items() for x in (f"--{name.replace('_', '-')}", value)]
    given_to = ["--out", tmp_path / "run", "--target", 2, "--text", text]
    made, options = caught(monkeypatch, *given_to, *flags, "--save-every", 4)
    assert asdict(made.settings) == {"target": 2, **given}
    assert made.source.settings.items() >= keys.items()
    assert options == {"save_every": 4}
    assert made.folder == tmp_path / "run"


def test_penalty_depends_on_the_gate_family(monkeypatch, tmp_path, text):
    for family, penalty in [("direct", "fixed"), ("hard_kuma", "ascent")]:
        made, _ = caught(monkeypatch, "--out", tmp_path / "run", *small(text), "--family", family)
        told = made.settings
        assert (told.penalty, told.penalty_rate, told.damping) == (penalty, None, None), family


def test_questions_from_a_file_replace_pass_keys(monkeypatch, tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text(
        json.dumps({"context": TEXT[:50], "question": "What sat?", "answer": "the cat"}) + "\n"
    )
    given = ["--out", tmp_path / "run", "--target", 3, "--questions", file]
    made, _ = caught(monkeypatch, *given, "--max-length", 120, "--seed", 4)
    assert made.source.settings["source"] == "questions"
    assert made.source.settings["seed"] == 4
    assert made.source.buckets[-1] == 120
    assert_refused(
        run("--out", tmp_path / "run", "--target", 3, "--questions", file, "--text", file),
        "--text is the filler",
    )


def assert_refused(ran, said):
    assert ran.exit_code == 2, ran.output
    assert ran.stdout == ""
    (line,) = ran.stderr.splitlines()
    assert line.startswith("error: ")
    assert said in line


def test_mistakes_are_one_line_and_leave_no_files(text, tmp_path):
    for args, said in [
        (["--target", 1], "target=1: must be from 2, layer 0's KV heads, to 4"),
        (["--family", "kuma"], "family='kuma': must be one of hard_kuma, hard_concrete, direct"),
        (["--steps", 0], "steps=0: must be at least 1"),
        (["--save-every", 0], "save_every=0: must be at least 1"),
        (["--asked", 2], "asked=2: must be at most needles=1"),
        (["--seed", -1], "seed=-1: must be at least 0"),
        (["--questions", "nowhere.jsonl"], "nowhere.jsonl"),
        (
            ["--questions", "any.jsonl", "--min-length", 9],
            "--min-length 9: is of pass keys, must not be given with",
        ),
        (["--text", "nowhere.txt"], "nowhere.txt"),
        (["--model", "nowhere.gguf"], "nowhere.gguf"),
    ]:
        given = ["--target", 3] if "--questions" in args else small(text)
        assert_refused(run("--out", tmp_path / "run", *given, *args), said)
        assert not list(tmp_path.iterdir()), args
