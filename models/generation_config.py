"""Reads a model's default sampling settings, and writes generation_config.json.

Folders have this file; GGUF files have general.sampling keys.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jsparse.models.safetensors_files import read_json

_NUMBERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_SAMPLING_ONLY = ("temperature", "top_k", "top_p", "min_p")
_FILE = "generation_config.json"
_GGUF = "general.sampling."
_GGUF_NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# settings of transformers that affect text, with their neutral values
_UNSUPPORTED = {
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "penalty_alpha": 0,
    "guidance_scale": 1,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "stop_strings": None,
}

logger = logging.getLogger("jsparse.models")


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Reads the settings that `generate` supports; {} if there is no generation_config.json."""
    file = folder / _FILE
    return resolve_settings(read_json(file), file) if file.is_file() else {}


def resolve_settings(fields: Mapping[str, Any], source: Path | str) -> dict[str, Any]:
    """Returns the fields of a generation_config.json that `generate` supports.

    Unless `do_sample` is true, sampling settings are omitted; if it is true without a temperature,
    the temperature is 1. Messages name the `source`.

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
    _warn_of(
        [
            name
            for name, neutral in _UNSUPPORTED.items()
            if fields.get(name) not in (None, neutral, [], {})
        ],
        source,
    )
    eos = settings.get("eos_token_id", [])
    if not all(
        type(token) is int and token >= 0 for token in (eos if isinstance(eos, list) else [eos])
    ):
        raise ValueError(f"{source}: eos_token_id={eos!r}: must be a token id or a list of them")
    if fields.get("do_sample"):
        return {"temperature": 1.0} | settings
    return {key: value for key, value in settings.items() if key not in _SAMPLING_ONLY}


def read_gguf_settings(metadata: Mapping[str, Any], source: Path | str) -> dict[str, Any]:
    """Returns the settings among a GGUF file's general.sampling keys that `generate` supports.

    A file with any of temp, top_k, top_p and min_p requests sampling, at temperature 1 by default.
    """
    stated = {
        key.removeprefix(_GGUF): value for key, value in metadata.items() if key.startswith(_GGUF)
    }
    fields: dict[str, Any] = {}
    for name in _GGUF_NAMES.keys() & stated.keys():
        value = stated[name]
        # the shortest decimal with this float32 value: 0.6, not 0.6000000238418579
        fields[_GGUF_NAMES[name]] = float(f"{value:.7g}") if isinstance(value, float) else value
    _warn_of([_GGUF + name for name in _unsupported(stated)], source)
    samples = any(name in fields for name in _SAMPLING_ONLY)
    return resolve_settings(fields | {"do_sample": samples}, source)


def _unsupported(stated: Mapping[str, Any]) -> list[str]:
    """Returns the keys that have an effect in llama.cpp but none here."""
    unused = set(stated) - _GGUF_NAMES.keys()
    if not stated.get("mirostat"):
        unused -= {"mirostat", "mirostat_tau", "mirostat_eta"}
    if not stated.get("xtc_probability"):
        unused -= {"xtc_probability", "xtc_threshold"}
    # -1: all tokens, as here
    if stated.get("penalty_repeat", 1) == 1 or stated.get("penalty_last_n") == -1:
        unused -= {"penalty_last_n"}
    return sorted(unused)


def _warn_of(names: list[str], source: Path | str) -> None:
    if names:
        logger.warning("%s: not supported and ignored: %s", source, ", ".join(names))


def write_generation_config(folder: Path, settings: dict[str, Any]) -> None:
    """Writes settings for `read_generation_config`; an empty dict writes no file."""
    if settings:
        text = json.dumps(settings | {"do_sample": "temperature" in settings}, indent=2)
        (folder / _FILE).write_text(text + "\n", encoding="utf-8")
