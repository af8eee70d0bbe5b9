"""Limits the number of connections by the file descriptors that this process may open."""

import logging
import resource
import time
from typing import NamedTuple

# if descriptors suffice: accepted connections, and those that wait to be accepted
MAX_CONNECTIONS, MAX_BACKLOG = 4096, 2048
# descriptors for files of the model, compiled programs and pipes, or a quarter of a small limit
RESERVED = 256
# a higher limit is of no use, and slows down programs that close all possible descriptors
MAX_LIMIT = 2**16
# seconds between two lines of the log
LOG_SECONDS = 60
logger = logging.getLogger("jsparse.server")


class Bounds(NamedTuple):
    """The most accepted connections of a server, and the most that wait to be accepted."""

    connections: int
    backlog: int


def bounds(each: int) -> Bounds:
    """Returns the bounds under the current limit, with `each` descriptors per connection.

    The event loop may accept a whole backlog at once while it is still closing another one.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        limit = MAX_LIMIT
    backlog = min(MAX_BACKLOG, limit // 8)
    free = limit - min(RESERVED, limit // 4) - 2 * backlog
    return Bounds(max(1, min(MAX_CONNECTIONS, free // each)), backlog)


def raise_limit(each: int) -> None:
    """Raises the soft limit to the hard one, and warns if it is too low for MAX_CONNECTIONS."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_LIMIT if hard == resource.RLIM_INFINITY else min(hard, MAX_LIMIT)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError) as error:  # the system has a lower limit of its own
            logger.debug("the limit of %d file descriptors stays: %s", soft, error)
    connections = bounds(each).connections
    if connections < MAX_CONNECTIONS:
        logger.warning(
            "the limit of %d file descriptors allows %d connections at a time: %d need a limit of "
            "%d (ulimit -n)",
            *(resource.getrlimit(resource.RLIMIT_NOFILE)[0], connections, MAX_CONNECTIONS),
            (each * MAX_CONNECTIONS + RESERVED) * 4 // 3,
        )


class Room:
    """The room for `most` connections, and the count of those closed to make room."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._closed, self._logged = 0, float("-inf")

    def count_closed(self) -> None:
        """Counts a connection that was closed to make room; logs the count once a minute."""
        self._closed += 1
        if time.monotonic() - self._logged >= LOG_SECONDS:
            logger.warning(
                "idle connections closed to make room for new ones: %d; at most %d fit",
                *(self._closed, self.most),
            )
            self._logged, self._closed = time.monotonic(), 0
