"""Tests that imports only go down, and that the check finds those that do not."""

import importlib.util
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("import_floors", ROOT / ".ci" / "import_floors.py")
assert spec is not None and spec.loader is not None
import_floors = importlib.util.module_from_spec(spec)
spec.loader.exec_module(import_floors)


def test_map_of_contributing_matches_the_check():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("## A map of the house")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| ")][1:]
    floors = [(name.strip(), *re.findall(r"`([\w.]+)`", rooms)) for name, rooms in rows]
    assert floors[::-1] == list(import_floors.FLOORS)


def test_no_import_goes_up_or_in_circles():
    count, found = import_floors.violations(ROOT)
    assert count > 150
    assert not found
    assert len(import_floors.drawing(ROOT / "jsparse")) == 1


def test_import_that_goes_up_or_across_is_found(tmp_path):
    for nth, (module, line, message) in enumerate(
        (
            ("cache", "from jsparse.policy import Policy", "vocabulary imports contract"),
            ("policy", "from jsparse import policies", "contract imports policies"),
            ("policies/quest", "    import jsparse.runtime.prefill", "policies imports runtime"),
            ("models/config", "from jsparse.cache import CacheSpec", "models imports vocabulary"),
            ("train/trainer", "from jsparse.evaluation import plan", "above runtime imports above"),
            ("policies/quest", "from jsparse import generate", "policies imports runtime"),
            ("policies/quest", "jsparse.generate()", "policies imports runtime"),
        )
    ):
        root = tmp_path / f"{nth}"
        file = root / "jsparse" / f"{module}.py"
        file.parent.mkdir(parents=True)
        file.write_text(f"def f():\n    pass\nif f:\n    {line.strip()}\n")
        (root / "jsparse" / "__init__.pyi").write_text("from jsparse.generation import generate\n")
        count, (found,) = import_floors.violations(root)
        assert count == 1
        assert f"jsparse/{module}.py:4: {message}" in found


def test_imports_for_types_and_downwards_are_accepted(tmp_path):
    (tmp_path / "jsparse").mkdir()
    (tmp_path / "jsparse" / "policy.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "from jsparse.cache import KVCache\n"
        "if TYPE_CHECKING:\n    from jsparse.runtime import prefill\n"
    )
    assert import_floors.violations(tmp_path) == (1, [])


def test_module_without_a_floor_is_refused(tmp_path):
    (tmp_path / "jsparse").mkdir()
    (tmp_path / "jsparse" / "utils.py").write_text("")
    with pytest.raises(SystemExit, match=r"jsparse\.utils belongs to no floor"):
        import_floors.violations(tmp_path)


def test_relative_import_is_refused(tmp_path):
    (tmp_path / "jsparse").mkdir()
    (tmp_path / "jsparse" / "cache.py").write_text("from .policies import quest\n")
    with pytest.raises(SystemExit, match=r"cache.py:1: a relative import hides its floor"):
        import_floors.violations(tmp_path)


def test_drawing_counts_packages_arrows_levels_and_circles(tmp_path):
    for name, text in {
        "__init__": "",
        "cache/__init__": "",
        "cache/layers": "from jsparse.shapes import Rows",
        "shapes": "",
        "runtime/rows": "from jsparse.cache.layers import Layer\nimport jsparse.runtime.session",
        "runtime/session": (
            "if TYPE_CHECKING:\n    from jsparse.runtime import rows\n"
            "from jsparse.shapes import Rows"
        ),
        "cli/app": "from jsparse.runtime import rows",
    }.items():
        file = tmp_path / "jsparse" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert import_floors.drawing(tmp_path / "jsparse") == [
        "4 packages, 4 arrows, 4 levels",
        "circle of modules: runtime.rows, runtime.session",
    ]
