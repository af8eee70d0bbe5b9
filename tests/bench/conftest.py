"""Fixtures of the tests of bench."""

import pytest


@pytest.fixture(autouse=True)
def _any_working_tree(monkeypatch):
    """States a revision, since tests also run in a modified working tree, which bench refuses."""
    monkeypatch.setenv("JSPARSE_REVISION", "tests")
