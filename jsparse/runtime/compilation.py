"""Keeps compiled programs on disk, so that the next process starts fast, and counts new ones."""

import os
from pathlib import Path

import jax

_traced = 0


def note_trace() -> None:
    """Counts a program; to be called in its body, which runs when it is traced and never else."""
    global _traced
    _traced += 1


def traces() -> int:
    """Returns how many programs have called `note_trace` so far, each time they were traced."""
    return _traced


def keep_compilations() -> None:
    """Turns jax's persistent compilation cache on, unless the user has set it up already.

    The cache lies in `cache_folder`, under jax.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def cache_folder() -> Path:
    """Returns the folder for what can be made again.

    It is $JSPARSE_CACHE_DIR, else jsparse in the user's cache folder ($XDG_CACHE_HOME or ~/.cache).
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("JSPARSE_CACHE_DIR") or Path(home) / "jsparse")
