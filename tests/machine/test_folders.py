"""Tests the locations of cache files, and that a user without a home folder needs none."""

from pathlib import Path

import jax
import pytest

from jsparse.machine.folders import cache_folder
from jsparse.policies import choices
from jsparse.runtime import compilation


@pytest.fixture
def homeless(monkeypatch):
    """Removes the home folder, as for an unnamed user in a container."""
    for name in ("JSPARSE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"JSPARSE_CACHE_DIR": "own", "XDG_CACHE_HOME": "caches"}, "own"),
        ({"XDG_CACHE_HOME": "caches"}, "caches/jsparse"),
    ],
)
def test_given_folder_needs_no_home(variables, folder, homeless, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(folder)


def test_no_files_are_kept_without_a_home(homeless, monkeypatch):
    monkeypatch.setattr(compilation, "_store", None)
    monkeypatch.setattr(jax.config, "update", lambda *_: pytest.fail("a cache was set up"))
    compilation.keep_compilations()
    assert compilation._store is None
    assert choices.stored() == []
    with pytest.raises(FileNotFoundError, match="JSPARSE_CACHE_DIR must name a folder"):
        choices.keep([])
