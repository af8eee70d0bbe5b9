"""Tests user-defined policies, which only a command line imports."""

import sys

import pytest

import jsparse
from jsparse.evaluation.plan import plan
from jsparse.policies.expressions import as_policy, parse
from jsparse.policies.own_code import resolve, with_budget
from jsparse.policy import Policy, resolved
from tests.support.tiny import spec_of, tiny_params

OWN = """
from jsparse.extend import Policy, StandIn, builder, everything, whole_number

@builder
def newest(tokens: int = 8, base: Policy | None = None) -> Policy:
    whole_number("tokens", tokens, 1)

    def select(state, layer, q, cache):
        return everything(cache.layers[layer].lengths), None, state

    return Policy(select)

@builder
def by_size(tokens: int = 8) -> StandIn:
    return StandIn(lambda spec: newest(tokens if spec.batch > 1 else 1))

plain = newest(3)
wrong = 4

def none():
    return None
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The path of a file with user-defined policies, which is also a module here."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "own_policies.py"
    file.write_text(OWN)
    yield file
    sys.modules.pop("own_policies", None)


def test_user_policy_is_named_by_its_location(own):
    for source in ("own_policies", "own_policies.py", "./own_policies.py"):
        for call in ("newest", "newest(tokens=3, base=dense)", "plain"):
            policy = resolve(f"{source}:{call}")
            assert isinstance(policy, Policy)
            assert policy.name == f"{source}:{call}"
            assert parse(policy.name) is policy is resolve(policy.name)
            assert str(own.parent) not in sys.path


def test_user_name_may_resolve_to_several_policies(own):
    asked = resolve("own_policies.py:by_size(tokens=5)")
    assert asked.name == "own_policies.py:by_size(tokens=5)"
    assert as_policy(asked.name) is asked is resolve(asked.name)
    params = tiny_params(num_layers=1)
    assert [resolved(asked, spec_of(params, rows)).name for rows in (1, 2)] == [
        "newest(tokens=1, base=None)",
        "newest(tokens=5, base=None)",
    ]


def test_invalid_reference_is_one_line(own):
    (own.parent / "broken.py").write_text("x\n")
    here = "own_policies.py"
    for expression, message in (
        (f"{here}:newer", "has no newer, did you mean newest. It has newest, by_size, plain$"),
        ("os:systm", "os has no systm. It has none$"),
        (f"{here}:wrong", "wrong must be a policy in .* marked @builder, not 4"),
        (f"{here}:none", "none must be a policy in own_policies.py, or a function marked"),
        ("os:system('true')", "system must be a policy in os, or a function marked @builder"),
        (f"{here}:newest(size=1)", "unexpected keyword argument 'size'"),
        (f"{here}:newest(tokens=open('x'))", "unknown policy 'open'"),
        ("absent.py:newest", r"absent.py cannot be imported \(FileNotFoundError"),
        ("absent_module:newest", r"absent_module cannot be imported \(ModuleNotFoundError"),
        ("broken.py:newest", r"cannot be imported \(NameError: name 'x' .*broken.py:1\)"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            resolve(expression)
        assert "\n" not in str(error.value)
        assert str(error.value).startswith(f"policy={expression!r}: ")
    with pytest.raises(ValueError, match="tokens=0: must be an integer of at least 1"):
        resolve(f"{here}:newest(0)")


def test_user_policy_decodes_and_is_evaluated(own, tmp_path):
    policy, params = resolve(f"{own}:newest(tokens=4)").name, tiny_params(num_layers=1)
    out = jsparse.generate(params, [1, 2, 3], policy=policy, max_new_tokens=4, eos_token_id=[])
    assert (
        out.token_ids
        == jsparse.generate(params, [1, 2, 3], max_new_tokens=4, eos_token_id=[]).token_ids
    )
    assert plan([policy], ["kl"], [64], 1).policies == ("dense()", policy)


def test_file_imports_modules_beside_it_and_may_have_dataclasses(own):
    (own.parent / "my_helper.py").write_text("TOKENS = 3\n")
    (own.parent / "with_helper.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "import jsparse\n"
        "from my_helper import TOKENS\n"
        "@dataclass\nclass Sizes:\n    tokens: int = TOKENS\n"
        "mine = jsparse.streaming(sink=0, recent=Sizes().tokens)\n"
    )
    assert resolve("with_helper.py:mine").select is jsparse.streaming(sink=0, recent=3).select
    sys.modules.pop("my_helper", None)


def test_expressions_are_resolved_as_usual():
    assert resolve(" streaming(sink=1)") is jsparse.streaming(sink=1)
    with pytest.raises(ValueError, match="path.py:function works only alone, on a command line"):
        resolve("keep(own.py:newest)")


def test_policy_with_another_budget(own):
    own.write_text(
        OWN + "\n@builder\ndef sized(budget: int) -> Policy:\n    return newest(budget)\n"
        "@builder\ndef even(budget: int = 7, by: int = 1) -> Policy:\n"
        "    whole_number('by', by, budget)\n    return newest(budget)\n"
    )
    for text, name in (
        ("quest", "quest(budget=64, bounds_dtype=None, slack=0.5, group='mean')"),
        ("arkvale(volume='cuboid', budget=8)", "arkvale(budget=64, volume='cuboid')"),
        ("lfps(budget=0.3)", None),  # a share
        ("keep(quest(budget=16))", None),  # not of the outermost policy
        ("own_policies.py:newest", None),
        ("own_policies.py:plain", None),
        ("own_policies.py:sized", "own_policies.py:sized(budget=64)"),
        ("own_policies:sized(8)", "own_policies:sized(64)"),
        ("own_policies:even(budget=7, by=2)", None),  # 64 is refused
    ):
        made = with_budget(text, 64)
        assert (None if made is None else made.name) == name, text


def test_given_budget_is_kept():
    assert with_budget("quest", 64, instead=False) is jsparse.quest(64)
    for text in ("quest(budget=16)", "quest(16)", "dense"):
        assert with_budget(text, 64, instead=False) is None
