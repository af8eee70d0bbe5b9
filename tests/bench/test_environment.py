"""Tests the record of a run: command line, revision, and the refusal of a modified tree."""

import subprocess

import pytest

from bench.lib import environment
from bench.lib.environment import REVISION_VARIABLES, describe

pytestmark = pytest.mark.pure


def git(folder, *arguments):
    identity = ("-c", "user.name=tests", "-c", "user.email=tests@example.org")
    command = ["git", *identity, "-c", "commit.gpgsign=false", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Returns an empty folder in place of the repository, without a given revision."""
    for variable in REVISION_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(environment, "REPOSITORY", tmp_path.resolve())
    return tmp_path.resolve()


@pytest.fixture
def repository(folder):
    """Returns a repository with one committed file."""
    (folder / "bench").mkdir()
    (folder / "bench" / "question.py").write_text("1\n")
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "First")
    return folder


def test_clean_tree_is_recorded_with_argv_and_revision(repository, monkeypatch):
    script = str(repository / "bench" / "question.py")
    monkeypatch.setattr("sys.argv", [script, "--json", "out.json"])
    (repository / "new.json").write_text("an untracked file changes nothing")
    found = describe()
    assert found["argv"] == ["bench/question.py", "--json", "out.json"]
    assert found["git_revision"] == git(repository, "rev-parse", "HEAD").strip()
    assert found["modified"] is False


def test_modified_tree_is_refused_unless_allowed(repository):
    (repository / "bench" / "question.py").write_text("2\n")
    revision = git(repository, "rev-parse", "HEAD").strip()
    with pytest.raises(SystemExit, match=f"differs from revision {revision[:10]}: commit") as error:
        describe()
    assert "\n" not in str(error.value) and "--allow-modified" in str(error.value)
    found = describe(allow_modified=True)
    assert (found["git_revision"], found["modified"]) == (revision, True)


def test_revision_comes_from_the_variable_without_git(folder, monkeypatch):
    assert {k: describe()[k] for k in ("git_revision", "modified")} == dict.fromkeys(
        ("git_revision", "modified")
    )
    for variable in reversed(REVISION_VARIABLES):
        monkeypatch.setenv(variable, variable)
        assert (describe()["git_revision"], describe()["modified"]) == (variable, None)
