"""Tests bench.cpu_steps: policies take turns behind one prompt, and what a report holds."""

import json
import sys

import pytest
from tiny import random_prompts, tiny_params

from bench import cpu_steps
from bench.cpu_steps import WARM_UPS, measure, table_of

(PROMPT,) = random_prompts((60,))


def test_policies_take_turns(monkeypatch):
    began = []

    def steps(params, policy, prompt, number):
        for nth in range(number):
            began.append((policy, nth))
            yield float(nth + 10 * (policy == "b")), 0.5 * nth

    monkeypatch.setattr(cpu_steps, "steps", steps)
    rows = measure(tiny_params(), ["a", "b"], PROMPT, 3)
    assert began == [(policy, nth) for nth in range(WARM_UPS + 3) for policy in "ab"]
    # the first steps do not count
    assert [row["ms"] for row in rows] == [
        {"median": WARM_UPS + 1 + more, "min": WARM_UPS + more, "max": WARM_UPS + 2 + more}
        for more in (0, 10)
    ]
    assert [row["attended"] for row in rows] == [0.5 * (WARM_UPS + 1)] * 2
    assert [row["over_first"] for row in rows] == [1, (WARM_UPS + 1) / (WARM_UPS + 11)]


@pytest.mark.slow
def test_a_run_writes_a_report(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_steps, "load", lambda name, dtype: tiny_params(num_layers=1))
    monkeypatch.setattr(cpu_steps, "text_tokens", lambda params: PROMPT)
    path, sizes = tmp_path / "x.json", ["--prompt-tokens", "50", "--steps", "2"]
    policies = ["--policy", "dense", "streaming(sink=1, recent=4)"]
    monkeypatch.setattr(sys, "argv", ["cpu_steps", *policies, *sizes, "--json", str(path)])
    cpu_steps.main()
    rows = json.loads(path.read_text())["results"]
    assert [row["attended"] for row in rows] == pytest.approx([1, 5 * (1 / 54 + 1 / 55) / 2])
    assert rows[0]["over_first"] == 1 and all(row["ms"]["min"] > 0 for row in rows)
    assert table_of(rows).row_count == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--prompt-tokens", "61"], "--prompt-tokens 61: must be from 1 to 60"),
    ],
)
def test_sizes_of_nothing_are_refused(monkeypatch, capsys, arguments, said):
    monkeypatch.setattr(cpu_steps, "load", lambda name, dtype: tiny_params(num_layers=1))
    monkeypatch.setattr(cpu_steps, "text_tokens", lambda params: PROMPT)
    monkeypatch.setattr(sys, "argv", ["cpu_steps", *arguments])
    with pytest.raises(SystemExit):
        cpu_steps.main()
    assert said in capsys.readouterr().err
