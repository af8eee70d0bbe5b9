"""Tests how file descriptors limit the connections of a server."""

import logging
import resource
from types import SimpleNamespace

import pytest

from jsparse.server import descriptors
from jsparse.server.descriptors import Room, bounds, raise_limit

pytestmark = pytest.mark.pure
INFINITY = resource.RLIM_INFINITY


@pytest.fixture
def limits(monkeypatch):
    """The soft and the hard limit, which the code under test reads and sets."""
    held = [1024, 1024]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(held))

    def set_limit(_, pair):
        held[:] = pair

    monkeypatch.setattr(resource, "setrlimit", set_limit)
    return held


def test_connections_leave_descriptors_for_everything_else(limits):
    for soft, each, connections, backlog in [
        (64, 1, 32, 8),
        (1024, 1, 512, 128),
        (1024, 2, 256, 128),
        (1024, 2000, 1, 128),
        (2**16, 1, 4096, 2048),
        (INFINITY, 2, 4096, 2048),
    ]:
        limits[0] = soft
        assert bounds(each) == (connections, backlog), soft


def test_the_soft_limit_is_raised_to_the_hard_one(limits, caplog):
    for before, after, lines in [
        ((1024, 1024), 1024, 1),
        ((1024, 4096), 4096, 1),
        ((1024, 20000), 20000, 0),
        ((1024, 2**20), 2**16, 0),
        ((256, INFINITY), 2**16, 0),
        ((2**17, 2**20), 2**17, 0),
        ((INFINITY, INFINITY), INFINITY, 0),
    ]:
        limits[:] = before
        caplog.clear()
        with caplog.at_level(logging.WARNING, "jsparse.server"):
            raise_limit(1)
        assert limits == [after, before[1]], before
        assert len(caplog.messages) == lines, before
        if lines:
            connections = bounds(1).connections
            assert f"the limit of {after} file descriptors allows {connections}" in caplog.text, (
                before
            )


def test_the_limit_in_the_log_is_enough(limits, caplog):
    for each in (1, 2):
        limits[:] = 1024, 1024
        raise_limit(each)
        needed = int(caplog.messages[-1].split("need a limit of ")[1].split()[0])
        limits[0] = needed
        assert bounds(each).connections == descriptors.MAX_CONNECTIONS
        limits[0] = needed - 3
        assert bounds(each).connections < descriptors.MAX_CONNECTIONS


def test_closed_connections_are_logged_once_a_minute(monkeypatch, caplog):
    now = [0.0]
    monkeypatch.setattr(descriptors, "time", SimpleNamespace(monotonic=lambda: now[0]))
    room = Room(8)
    for now[0] in (1, 2, 3, 62, 63):
        room.count_closed()
    said = [message.split(":")[1] for message in caplog.messages]
    assert said == [" 1; at most 8 fit", " 3; at most 8 fit"]
