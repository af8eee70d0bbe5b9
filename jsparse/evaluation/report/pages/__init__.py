"""Makes single-file pages that include style, script and data, and fetch nothing."""

import json
from importlib import resources
from typing import Any


def fill(name: str, data: dict[str, Any]) -> str:
    """Returns the page NAME.html of this folder with its data as JSON."""
    folder = resources.files(__name__)
    template = folder.joinpath(f"{name}.html").read_text(encoding="utf-8")
    style = folder.joinpath("style.css").read_text(encoding="utf-8")
    # in JSON these occur only in strings; a text must not end its HTML element
    safe = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    return template.replace("{{style}}", style).replace("{{data}}", safe)
