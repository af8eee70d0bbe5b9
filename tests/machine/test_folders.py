"""Tests where files of a cache lie, and that a user without a home folder needs none."""

from pathlib import Path

import jax
import pytest

from jsparse.machine.folders import cache_folder
from jsparse.policies import choices
from jsparse.runtime import compilation


@pytest.fixture
def homeless(monkeypatch):
    """Takes away the home folder, as of a user without a name in a container."""
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
def test_a_folder_that_is_named_needs_no_home(variables, folder, homeless, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(folder)


def test_without_a_home_nothing_is_kept(homeless, monkeypatch):
    monkeypatch.setattr(compilation, "_store", None)
    monkeypatch.setattr(jax.config, "update", lambda *_: pytest.fail("a cache was set up"))
    compilation.keep_compilations()
    assert compilation._store is None
    assert choices.stored() == []
    with pytest.raises(FileNotFoundError, match="JSPARSE_CACHE_DIR must name a folder"):
        choices.keep([])
