"""Tests of .ci/plain_words.py, which finds phrases to avoid in docstrings, comments and pages."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

SCRIPT = Path(__file__).parents[1] / ".ci" / "plain_words.py"


def found(folder: Path, name: str, text: str) -> list[str]:
    """Returns the lines that the script prints about a file with this text."""
    (folder / name).write_text(text, encoding="utf-8")
    command = [sys.executable, str(SCRIPT), str(folder / name)]
    return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.parametrize(
    "phrase",
    [
        "Returns what is in flight.",
        "Serves whoever comes first.",
        "The pages lie in host memory.",
        "Drops tokens behind the last.",
        "Runs as many steps as there are.",
        "None is that nothing is drafted.",
        "It reads keys, too.",
        "Is a connection to another process.",
    ],
)
def test_phrases_in_docstrings_comments_and_pages_are_found(tmp_path, phrase):
    assert found(tmp_path, "module.py", f'"""{phrase}"""\n')
    if not phrase.startswith("Is "):
        assert found(tmp_path, "module.py", f"x = 1\n# {phrase}\n")
        assert found(tmp_path, "page.md", f"# Title\n\n{phrase}\n")


def test_the_line_of_a_phrase_is_printed(tmp_path):
    text = '"""A module."""\n\n\ndef f():\n    """Returns x.\n\n    The pages lie here.\n    """\n'
    assert any("module.py:7: " in line for line in found(tmp_path, "module.py", text))


def test_code_questions_and_idioms_are_accepted(tmp_path):
    page = "It stands for n. Twice as many. What is a page?\n\n```python\n# what lies behind\n```\n"
    assert not found(tmp_path, "page.md", page)
    assert not found(tmp_path, "module.py", 'what = behind = "what lies behind"\n')
