"""Tests recommendations for given times and closeness; nothing is measured."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jsparse.benchmark import recommend as module
from jsparse.benchmark.ranking import ranked
from jsparse.benchmark.recommend import choice, recommend
from jsparse.benchmark.requirements import Requirements, candidates, checked
from jsparse.cli.app import app
from jsparse.evaluation.store import Entry
from jsparse.models.checkpoint import load
from jsparse.policies.auto import auto
from jsparse.policies.choices import stored
from jsparse.policies.expressions import parse
from jsparse.policy import resolved
from jsparse.runtime import capacity

MODEL = str(Path(__file__).parents[1] / "fixtures" / "hf" / "llama3" / "model.gguf")
NEAR, FAR = "streaming(sink=4, recent=240)", "streaming(sink=4, recent=8)"
SLOW, SLOWER = "streaming(sink=8, recent=8)", "streaming(sink=4, recent=300)"
WANTED = Requirements("m", 512, 1, (NEAR, FAR, SLOW))


def entry(policy, task, index=0, **values):
    return Entry(policy=policy, task=task, length=512, index=index, values=values, meta={})


def measured(policy, ms, kl=0.001, agreement=1.0, lost=(), later=()):
    """A policy's entries: two texts and four pass keys of each kind, some of them lost."""
    return [
        entry(policy, "steps", ms=ms, attended=0.5),
        *(entry(policy, "kl", index, kl=kl, agreement=agreement) for index in range(2)),
        *(entry(policy, "passkey", i, score=float(i not in lost)) for i in range(4)),
        *(entry(policy, "passkey_turn2", i, score=float(i not in later)) for i in range(4)),
    ]


DENSE = measured("dense()", 10.0, lost=(3,))


def verdicts(entries, **wanted):
    rows = ranked(entries, WANTED._replace(**wanted))
    return [(row["policy"], row["verdict"]) for row in rows]


def test_fastest_close_policy_comes_first():
    entries = [*DENSE, *measured(NEAR, 8.0), *measured(FAR, 5.0, kl=0.019), *measured(SLOW, 20.0)]
    assert verdicts(entries) == [
        (FAR, ""),
        (NEAR, ""),
        ("dense()", ""),
        (SLOW, "no faster than dense attention"),
    ]
    assert verdicts(entries, kl=0.01)[:3] == [(NEAR, ""), ("dense()", ""), (FAR, "KL above 0.01")]


def test_each_rule_alone_rejects_a_policy():
    """A pass key that dense attention also misses does not count as lost."""
    for changed, verdict in [
        ({"kl": 0.021}, "KL above 0.02"),
        ({"lost": (1, 2, 3)}, "loses 2 of 4 pass keys"),
        ({"later": (0,)}, "loses 1 of 4 pass keys that a later turn asks for"),
        ({"ms": 9.9}, "no faster than dense attention"),
    ]:
        wanted = {"policies": (NEAR,)}
        good = {"ms": 5.0, "lost": (3,)}
        assert verdicts([*DENSE, *measured(NEAR, **good)], **wanted)[0] == (NEAR, ""), changed
        found = verdicts([*DENSE, *measured(NEAR, **good | changed)], **wanted)
        assert found == [("dense()", ""), (NEAR, verdict)], changed


def test_exact_accepts_no_other_token():
    entries = [*DENSE, *measured(NEAR, 5.0, agreement=0.75)]
    wanted = {"policies": (NEAR,)}
    assert verdicts(entries, **wanted)[0] == (NEAR, "")
    assert verdicts(entries, exact=True, **wanted) == [
        ("dense()", ""),
        (NEAR, "chooses another token at 25.0% of the positions"),
    ]


def test_candidates_fit_the_context():
    for context in [512, 1000, 4096, 131072]:
        names = [parse(text).name for text in candidates(context)]
        assert len(set(names)) == len(names) >= 5, context
        assert checked(Requirements("m", context, 1, tuple(names)), context).policies == tuple(
            names
        ), context
        assert f"budget={max(context // 8 // 16, 2) * 16}," in " ".join(names), context


def test_bad_values_are_refused():
    for changed, words in [
        ({"context": 0}, "context=0"),
        ({"context": 600}, "context=600: must be from 512"),
        ({"batch": 0}, "batch=0"),
        ({"samples": 0}, "samples=0"),
        ({"kl": float("nan")}, "kl=nan"),
        ({"policies": ("dense",)}, "must name one other than"),
        ({"policies": ("auto",)}, "must be a policy, not a placeholder"),
        ({"policies": ("lru",)}, "unknown policy"),
    ]:
        with pytest.raises(ValueError, match=words):
            checked(WANTED._replace(**changed), 512)


@pytest.fixture
def times(tmp_path, monkeypatch):
    """Given times by policy in place of measured ones, and the policies that were timed."""
    monkeypatch.setenv("JSPARSE_CACHE_DIR", str(tmp_path))
    given, asked = {"dense()": 10.0, NEAR: 5.0, FAR: 4.0, SLOWER: 6.0}, []

    def time_steps(params, policy, *, batch, context):
        asked.append(policy)
        if policy not in given:
            raise ValueError("budget: is not to be had here")
        return {"ms": {"median": given[policy]}, "attended": 0.5}

    monkeypatch.setattr(module, "time_steps", time_steps)
    return asked


@pytest.fixture
def closeness(monkeypatch):
    """Given closeness by policy in place of a measured one; other policies are refused."""
    given = {"dense()": {}, NEAR: {"kl": 0.01}, FAR: {"kl": 0.3}, SLOWER: {"kl": 0.01}}

    def run(params, plan, store, report=None):
        unknown = [policy for policy in plan.policies if policy not in given]
        if unknown:
            raise ValueError(f"{unknown[0]} is not to be had here")
        for policy in plan.policies:
            made = measured(policy, 1.0, **given[policy])
            store.add(each for each in made if each["task"] in plan.tasks)

    monkeypatch.setattr(module, "run", run)
    return given


@pytest.fixture(scope="module")
def model():
    return load(MODEL)


def test_interrupted_run_resumes_and_failures_give_their_reason(
    model, times, closeness, monkeypatch
):
    wanted = Requirements(MODEL, 512, 1, (FAR, NEAR, SLOW), samples=4)
    compare, said = module._compare, []

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_compare", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recommend(model, wanted, notify=said.append)
    monkeypatch.setattr(module, "_compare", compare)
    found = recommend(model, wanted, notify=said.append)
    assert times == ["dense()", FAR, NEAR, SLOW]
    assert [line.split(":")[0] for line in said if "measurements" in line] == ["Interrupted"]
    assert sum("Continuing an unfinished run" in line for line in said) == 1
    assert sum("about a minute" in line for line in said) == 1  # before the interrupt
    assert "streaming(recent=240): 5 ms a step, dense attention 10" in said
    assert f"{SLOW}: cannot run here" in said
    assert [(row["policy"], row["verdict"]) for row in found["rows"]] == [
        (NEAR, ""),
        ("dense()", ""),
        (FAR, "KL above 0.02"),
        (SLOW, "refused: budget: is not to be had here"),
    ]
    made = choice(found)
    assert (made.policy, made.ms, made.dense_ms, made.kl) == (NEAR, 5, 10, 0.01)
    assert made.context == 512
    recommend(model, wanted)  # a finished run is measured again
    assert len(times) == 8


def asked(*options):
    return CliRunner().invoke(app, ["recommend", MODEL, "--only", "--context", "512", *options])


def test_pass_keys_are_run_only_for_the_fastest_close_policies(model, times, closeness):
    closeness[FAR] = {"lost": (1,)}
    wanted = Requirements(MODEL, 512, 1, (SLOWER, FAR, NEAR), samples=4)
    rows = recommend(model, wanted)["rows"]
    assert [(row["policy"], row["verdict"], row["found"]["passkey"]) for row in rows] == [
        (NEAR, "", 4),
        ("dense()", "", 4),
        (FAR, "loses 1 of 4 pass keys", 3),
        (SLOWER, "slower than the one to take", None),
    ]


def test_command_saves_a_choice_that_auto_uses(model, times, closeness):
    ran = asked("--policy", NEAR, "--policy", FAR)
    assert ran.exit_code == 0
    assert 'Take it with --policy "streaming(recent=240)"' in ran.stdout
    assert "about a minute" in ran.stderr
    assert [kept.policy for kept in stored()] == [NEAR]
    spec = capacity.cache_spec(model, [[]], 500, None, 16)
    assert resolved(auto(), spec).name == NEAR
    assert asked("--policy", NEAR, "--kl", "0").exit_code == 1
    assert [kept.policy for kept in stored()] == ["dense()"]


def test_scripts_get_json_and_the_exit_code(times, closeness):
    ran = asked("--policy", FAR, "--no-keep", "--json")
    assert ran.exit_code == 1
    assert json.loads(ran.stdout)["best"]["policy"] == "dense()"
    assert stored() == []
    bad = asked("--context", "10000000")
    assert bad.exit_code == 2
    assert "must be from 512" in bad.stderr


@pytest.mark.slow
def test_closeness_is_measured(model, times):
    found = recommend(model, Requirements(MODEL, 512, 1, (FAR,), kl=1e9, samples=2, steps=4))
    dense, far = (next(r for r in found["rows"] if r["policy"] == p) for p in ("dense()", FAR))
    assert (dense["kl"], dense["agreement"], dense["of"]) == (0, 1, 2)
    assert (far["ms"], far["over_dense"], far["of"]) == (4, 2.5, 2)
    assert far["kl"] > 0
    assert found["length"] == 512
