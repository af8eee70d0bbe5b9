"""The repository's root, and the code on its pages."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks(page: Path, language: str) -> list[str]:
    """Returns the blocks of code in a language."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
