"""Tests that the docs and the stub list the policies of the registry."""

import importlib.util
import inspect
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from jsparse.policies import POLICIES, REGISTRY
from jsparse.policies.method import Method

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("policy_tables", ROOT / ".ci" / "policy_tables.py")
assert spec is not None and spec.loader is not None
policy_tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(policy_tables)

HOME = "jsparse/policies/__init__.py"


def test_every_list_of_policies_matches_the_registry():
    stale = list(policy_tables.outdated(ROOT, REGISTRY))
    assert not stale, f"{', '.join(stale)}: run {policy_tables.COMMAND}"


def test_table_of_uses_names_every_policy():
    table = policy_tables.uses(REGISTRY)
    missing = [name for name in POLICIES if not re.search(rf"\b{name}\(", table)]
    assert not missing, (
        f"{missing}: set `when` in its entry of {HOME}, or add it to another's `calls`"
    )


def test_texts_are_short():
    for policy in REGISTRY:
        for text in (policy.attends, policy.when):
            assert len(text.split()) <= 25, text


def test_wrappers_are_the_methods_with_a_policy_argument():
    for policy in REGISTRY:
        takes = "policy" in inspect.signature(policy.build).parameters
        assert takes == (policy.kind == "wraps"), f"{policy.build}: set `kind` in {HOME}"


@pytest.fixture
def checkout(tmp_path):
    """A folder with the files that list policies."""
    for file in policy_tables.PARTS:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def test_method_and_its_entry_suffice_for_every_list(checkout, monkeypatch):
    module = ModuleType("jsparse.policies.newest", 'Paper: "Newest", arXiv:2601.00001.')
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def newest(recent=8):
        """Attend to the newest tokens."""

    newest.__module__ = module.__name__
    entry = Method(newest, attends="the newest tokens", paper="Newest", when="never")
    policies = [*REGISTRY, entry]
    changed = policy_tables.outdated(checkout, policies)
    assert list(changed) == list(policy_tables.PARTS)
    for file, *lines in (
        (
            "docs/policies.md",
            "| `newest()` | the newest tokens | never |",
            "| `newest(recent)` | Newest, [2601.00001](https://arxiv.org/abs/2601.00001) |",
        ),
        ("docs/api.md", "::: jsparse.policies.newest.newest"),
        ("jsparse/__init__.pyi", "from jsparse.policies.newest import newest as newest"),
    ):
        before = (checkout / file).read_text("utf-8").splitlines()
        assert set(changed[file].splitlines()) - set(before) == {*lines}
        (checkout / file).write_text(changed[file], "utf-8")
    assert not policy_tables.outdated(checkout, policies)


def test_file_without_its_comments_is_refused_by_name(checkout):
    page = checkout / "docs" / "policies.md"
    text = page.read_text("utf-8")
    page.write_text(text.replace("<!-- end of policies -->", ""), "utf-8")
    with pytest.raises(
        SystemExit, match=r"docs/policies.md must have the comments 'policies: written by"
    ):
        policy_tables.outdated(checkout, REGISTRY)
