"""Reads a model's config, including its family, from the headers of its files."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jsparse.models.config import Experts, ModelConfig
from jsparse.models.families import FAMILIES, GGUF_FAMILIES, Family
from jsparse.models.gguf import GGUFFile
from jsparse.models.hub import is_gguf, locate
from jsparse.models.rope_scaling import rope_from_saved
from jsparse.models.safetensors_files import read_json

PICKLES = {".bin", ".pt", ".pth", ".pkl", ".ckpt"}
ROPE_FACTORS = "rope_freqs.weight"


def read_config(model: str | os.PathLike[str], *, revision: str | None = None) -> ModelConfig:
    """Reads a model's sizes as `load` does, without downloading a Hub id's weights."""
    path = checked_path(locate(model, revision, weights=False), model)
    return folder_config(path)[0] if path.is_dir() else gguf_config(GGUFFile(path))


def checked_path(path: Path, model: str | os.PathLike[str]) -> Path:
    """Raises ValueError unless the path is a folder or a GGUF file."""
    if path.is_dir() or is_gguf(path):
        return path
    if path.suffix.lower() in PICKLES:
        raise ValueError(
            f"model={str(model)!r} is a pickle: these run code when read and are never loaded"
        )
    if path.suffix.lower() == ".safetensors":
        raise ValueError(
            f"model={str(model)!r} is a file: pass its folder {str(path.parent)!r}, which has "
            "config.json"
        )
    raise ValueError(
        f"model={str(model)!r} is a {path.suffix or 'bare'} file: must be a .gguf file or a folder"
    )


def folder_config(folder: Path) -> tuple[ModelConfig, bool]:
    """Returns a folder's config, and whether `save` wrote it: it has a family but no model_type."""
    file = folder / "config.json"
    fields = read_json(file)
    is_saved = "family" in fields
    field = "family" if is_saved else "model_type"
    family = family_of(fields.get(field), f"{file}: {field}")
    config = checked_config(
        file, lambda: _config_from_saved(fields) if is_saved else family.config_from_hf(fields)
    )
    return config, is_saved


def gguf_config(store: GGUFFile) -> ModelConfig:
    """Returns a GGUF file's config, including RoPE factors stored as a tensor."""
    stated = store.metadata.get("general.architecture")
    family = family_of(stated, f"{store.path}: general.architecture", GGUF_FAMILIES)
    config = checked_config(
        store.path, lambda: family.config_from_gguf(store.metadata, store.shapes)
    )
    if ROPE_FACTORS not in store.shapes:
        return config
    factors = tuple(store.read(ROPE_FACTORS).astype(float).ravel().tolist())
    return checked_config(store.path, lambda: dataclasses.replace(config, rope_factors=factors))


def family_of(name: Any, field: str, families: Mapping[str, Family] = FAMILIES) -> Family:
    """Returns the family of this name; otherwise raises a ValueError that names the field."""
    if not isinstance(name, str) or name not in families:
        raise ValueError(f"{field} is {name!r}: must be one of {list(families)}")
    return families[name]


def checked_config(source: Path | str, make: Callable[[], ModelConfig]) -> ModelConfig:
    """Calls `make` and converts its errors to a ValueError that names the source."""
    try:
        return make()
    except (ValueError, TypeError, ArithmeticError, AttributeError) as error:
        message, _, _ = str(error).partition("\n")
        raise ValueError(f"{source}: {message}") from None


def _config_from_saved(fields: dict[str, Any]) -> ModelConfig:
    """Returns the ModelConfig that `save` wrote."""
    if fields.get("rope_scaling") is not None:
        fields = fields | {"rope_scaling": rope_from_saved(fields["rope_scaling"])}
    if fields.get("rope_factors") is not None:
        fields = fields | {
            "rope_factors": tuple(float(factor) for factor in fields["rope_factors"])
        }
    if fields.get("experts") is not None:
        fields = fields | {"experts": Experts(**fields["experts"])}
    fields = fields | {"windows": tuple(fields.get("windows", ()))}
    return ModelConfig(**{name: value for name, value in fields.items() if name != "weights"})
