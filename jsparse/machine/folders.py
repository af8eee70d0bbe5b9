"""Says where jsparse keeps files of its own; this module imports nothing else of jsparse."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Returns the folder for files that can be made or measured again.

    It is $JSPARSE_CACHE_DIR, else jsparse in the user's cache folder ($XDG_CACHE_HOME or ~/.cache).
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("JSPARSE_CACHE_DIR") or Path(home) / "jsparse")
