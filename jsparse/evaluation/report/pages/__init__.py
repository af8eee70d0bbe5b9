"""Makes pages that are one file: style, script and data are inside, and nothing is fetched."""

import json
from importlib import resources
from typing import Any


def fill(name: str, data: dict[str, Any]) -> str:
    """Returns the page NAME.html of this folder with its data as JSON."""
    folder = resources.files(__name__)
    template = folder.joinpath(f"{name}.html").read_text(encoding="utf-8")
    style = folder.joinpath("style.css").read_text(encoding="utf-8")
    # in JSON these only stand in strings; a text must not end the element that holds it
    safe = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    return template.replace("{{style}}", style).replace("{{data}}", safe)
