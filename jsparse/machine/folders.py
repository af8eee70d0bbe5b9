"""Says where jsparse keeps files of its own; this module imports nothing else of jsparse."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Returns the folder for files that can be made or measured again.

    It is $JSPARSE_CACHE_DIR, else jsparse in the user's cache folder ($XDG_CACHE_HOME or ~/.cache).

    Raises:
        FileNotFoundError: these are not set, and the user has no home folder.
    """
    if own := os.environ.get("JSPARSE_CACHE_DIR"):
        return Path(own)
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches) / "jsparse"
    try:
        return Path.home() / ".cache" / "jsparse"
    except RuntimeError:  # no $HOME, and a user without a name
        raise FileNotFoundError(
            "there is no home folder for a cache: JSPARSE_CACHE_DIR must name a folder"
        ) from None
