"""Tests that what the docs and the stub list of policies is what the registry says."""

import importlib.util
import re
import shutil
from pathlib import Path

import pytest

from jsparse.text import signatures
from jsparse.text.signatures import registered

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("policy_tables", ROOT / ".ci" / "policy_tables.py")
assert spec is not None and spec.loader is not None
policy_tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(policy_tables)

REGISTRY = "jsparse/policies/__init__.py"
ENTRY = """    Method(
        newest,
        attends="the newest tokens",
        paper="Newest",
        when="never",
    ),
"""
MODULE = '''"""Newest attends to the newest tokens.

Paper: "Newest", arXiv:2601.00001.
"""


def newest(recent=8):
    """Attend to the newest tokens."""
'''


def test_every_list_of_policies_is_what_the_registry_says():
    stale = list(policy_tables.outdated(ROOT, registered()))
    assert not stale, f"{', '.join(stale)}: run {policy_tables.COMMAND}"


def test_the_readme_names_every_policy():
    table = policy_tables.uses(ROOT, registered())
    missing = [name for name in registered() if not re.search(rf"\b{name}\(", table)]
    assert not missing, (
        f"{missing}: set `when` in its entry of {REGISTRY}, or add it to another's `calls`"
    )


def test_wrappers_are_the_methods_that_take_a_policy():
    for name, policy in registered().items():
        wraps = policy.texts.get("kind") == "wraps"
        assert wraps == ("policy" in policy.parameters), f"{name}: set `kind` in {REGISTRY}"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Returns a folder with the registry, all policies and the files that list just these."""
    shutil.copytree(ROOT / "jsparse" / "policies", tmp_path / "jsparse" / "policies")
    for file in ("jsparse/builder.py", *policy_tables.PARTS):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    for file, text in policy_tables.outdated(tmp_path, registered()).items():
        (tmp_path / file).write_text(text, "utf-8")
    monkeypatch.setattr(signatures, "PACKAGE", tmp_path / "jsparse")
    return tmp_path


def test_a_method_and_its_entry_are_all_that_the_lists_need(checkout):
    (checkout / "jsparse" / "policies" / "newest.py").write_text(MODULE)
    text = (checkout / REGISTRY).read_text("utf-8")
    text = text.replace(
        "\n\nREGISTRY", "\nfrom jsparse.policies.newest import newest\n\nREGISTRY", 1
    )
    text = text.replace("    Method(\n        quest,", f"{ENTRY}    Method(\n        quest,")
    (checkout / REGISTRY).write_text(text, "utf-8")

    policies = registered.__wrapped__()
    changed = policy_tables.outdated(checkout, policies)
    assert list(changed) == list(policy_tables.PARTS)
    for file, line in (
        ("README.md", "| `newest()` | the newest tokens | never |"),
        (
            "docs/policies.md",
            "| `newest(recent)` | the newest tokens "
            "| Newest, [2601.00001](https://arxiv.org/abs/2601.00001) |",
        ),
        ("docs/api.md", "::: jsparse.policies.newest.newest"),
        ("jsparse/__init__.pyi", "from jsparse.policies.newest import newest as newest"),
    ):
        before = (checkout / file).read_text("utf-8").splitlines()
        assert set(changed[file].splitlines()) - set(before) == {line}
        (checkout / file).write_text(changed[file], "utf-8")
    assert not policy_tables.outdated(checkout, policies)


def test_a_file_without_its_comments_is_refused_by_name(checkout):
    text = (checkout / "README.md").read_text("utf-8")
    (checkout / "README.md").write_text(text.replace("<!-- end of policies -->", ""), "utf-8")
    with pytest.raises(SystemExit, match=r"README.md must have the comments 'policies: written by"):
        policy_tables.outdated(checkout, registered())
