"""Tests that links work, and that the docs agree with one another."""

import ast
import re
import runpy
from pathlib import Path

import pytest

from tests.support.pages import ROOT, blocks

pytestmark = pytest.mark.pure

PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "bench" / "README.md"})
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_have_targets():
    for page in PAGES:
        for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
            there = (page.parent / target).resolve() if target else page
            assert there.exists(), (page, target)
            assert not anchor or anchor in anchors(there), (page, target, anchor)


def test_api_reference_has_every_public_name():
    names = (ROOT / "jsparse" / "__init__.pyi").read_text(encoding="utf-8")
    public = {".".join(found) for found in re.findall(r"^from (\S+) import (\w+)", names, re.M)}
    shown = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.M)
    assert public <= set(shown)
    assert len(shown) == len(set(shown))


def test_readme_is_short_and_has_its_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 110
    first, second = blocks(ROOT / "README.md", "sh")
    assert "jsparse generate" in first
    assert second.splitlines()[-1] == "python3 -m uv run pytest"


def test_policies_of_the_docs_are_those_of_the_examples():
    quest, newest, *_ = blocks(ROOT / "docs" / "own_policy.md", "python")
    assert len(quest.splitlines()) <= 25
    for block, example in ((quest, "my_quest"), (newest, "own_policy")):
        _, _, code = block.partition("\n\n\n")
        assert "@builder" in code
        assert code in (ROOT / "examples" / f"{example}.py").read_text("utf-8")


def test_figures_of_choosing_are_on_the_pages_they_cite():
    rows = re.findall(r"^\| .+$", (ROOT / "docs" / "choosing.md").read_text("utf-8"), re.MULTILINE)
    for row in (row for row in rows if "figures](" in row):
        cited = " ".join((ROOT / "docs" / page).read_text("utf-8") for page, _ in LINK.findall(row))
        for figure in re.findall(r"\d+\.\d+", re.sub(r"`[^`]+`", "", row)):
            assert re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", cited), (row, figure)


def test_figures_are_drawn_from_their_source():
    drawing = runpy.run_path(str(ROOT / "docs" / "figures" / "draw.py"))
    sources = sorted((ROOT / "docs" / "figures").glob("*.toml"))
    assert sources
    for source in sources:
        drawn = (ROOT / "docs" / "images" / f"{source.stem}.svg").read_text("utf-8")
        assert drawn == drawing["draw"](source.read_text("utf-8"))


def test_steps_of_a_request_are_functions_of_their_files():
    text = (ROOT / "docs" / "life_of_a_request.md").read_text("utf-8")
    steps = re.findall(r"^(\d+)\. \*\*`([\w.]+)`\*\*, \[(\S+)\]\(\.\./(\S+)\):", text, re.MULTILINE)
    assert [int(number) for number, *_ in steps] == list(range(1, 21))
    for _, name, shown, file in steps:
        body = ast.parse((ROOT / file).read_text("utf-8")).body
        for part in name.split("."):
            found = [node for node in body if getattr(node, "name", None) == part]
            assert found, (name, file)
            body = getattr(found[0], "body", [])
        assert shown == file


def test_contract_lists_every_field_of_a_policy_once():
    text = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
    table = text[text.index("| field |") : text.index("## Rows and pages")]
    listed = re.findall(r"^\| `(\w+)` \|", table, re.M)
    tree = ast.parse((ROOT / "jsparse" / "policy.py").read_text(encoding="utf-8"))
    [policy] = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Policy"]
    fields = [n for n in policy.body if isinstance(n, ast.AnnAssign)]
    assert listed == [ast.unparse(field.target) for field in fields]
    for field in fields:  # its meaning follows below
        assert isinstance(policy.body[policy.body.index(field) + 1], ast.Expr), ast.unparse(field)
