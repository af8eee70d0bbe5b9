"""Defines the folder for jsparse's own files; this module imports nothing else of jsparse."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Returns the folder for files that can be created or measured again.

    It is $JSPARSE_CACHE_DIR, or else jsparse in the user's cache folder ($XDG_CACHE_HOME or
    ~/.cache).
    """
    if folder := os.environ.get("JSPARSE_CACHE_DIR"):
        return Path(folder)
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches) / "jsparse"
    try:
        return Path.home() / ".cache" / "jsparse"
    except RuntimeError:  # no $HOME, and a user without a name
        raise FileNotFoundError(
            "there is no home folder for a cache: JSPARSE_CACHE_DIR must name a folder"
        ) from None


def distrust(folder: Path) -> str | None:
    """Returns why code in a folder must not be run, since other users may write it, or None."""
    if os.name != "posix":
        return None
    try:
        status = folder.stat()
    except OSError:
        return None
    if status.st_uid not in (os.getuid(), 0):
        return f"its owner is user {status.st_uid}: must be this user or root"
    if status.st_mode & 0o022:
        return f"its mode is {status.st_mode & 0o777:o}: must be writable by its owner alone"
    return None
