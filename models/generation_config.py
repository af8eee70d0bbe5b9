"""Reads and writes generation_config.json: how a model's authors want it to be sampled."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jsparse.models.safetensors_files import read_json

_NUMBERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_SAMPLING_ONLY = ("temperature", "top_k", "top_p", "min_p")
_FILE = "generation_config.json"


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Reads the settings that `generate` knows; {} if there is no generation_config.json.

    Raises:
        ValueError: the file is malformed.
    """
    file = folder / _FILE
    return resolve_settings(read_json(file), file) if file.is_file() else {}


def resolve_settings(fields: Mapping[str, Any], source: Path | str) -> dict[str, Any]:
    """Returns the settings that `generate` knows.

    `do_sample` is resolved here: unless it is true, the model is to be decoded greedily and the
    sampling settings are left out; if it is true and no temperature is given, the temperature is 1.

    Args:
        fields: the fields of a generation_config.json.
        source: where they come from, for messages.

    Raises:
        ValueError: a setting is malformed.
    """
    settings = {
        key: fields[key] for key in (*_NUMBERS, "eos_token_id") if fields.get(key) is not None
    }
    for key in _NUMBERS:
        value = settings.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{source}: {key}={value!r}: must be a number")
    eos = settings.get("eos_token_id", [])
    if not all(
        type(token) is int and token >= 0 for token in (eos if isinstance(eos, list) else [eos])
    ):
        raise ValueError(f"{source}: eos_token_id={eos!r}: must be a token id or a list of them")
    if fields.get("do_sample"):
        return {"temperature": 1.0} | settings
    return {key: value for key, value in settings.items() if key not in _SAMPLING_ONLY}


def write_generation_config(folder: Path, settings: dict[str, Any]) -> None:
    """Writes settings for `read_generation_config`; an empty dict writes no file."""
    if settings:
        text = json.dumps(settings | {"do_sample": "temperature" in settings}, indent=2)
        (folder / _FILE).write_text(text + "\n", encoding="utf-8")
