"""Allows pages of configured origins to use a server from a browser (CORS)."""

import re
from collections.abc import Iterable, Set

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from jsparse.server.errors import shown

ANY = "*"
# a browser sends scheme and host in lower case, and no path
FORM = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,]+")


def checked(given: Iterable[str]) -> frozenset[str]:
    """Returns origins as browsers spell them; ValueError: one is neither an origin nor "*"."""
    origins = frozenset(origin.lower() for origin in given)
    for origin in origins - {ANY}:
        if not FORM.fullmatch(origin):
            raise ValueError(
                f"--allowed-origins {shown(origin)}: must be an origin without a path, such as "
                "http://localhost:3000, or *"
            )
    return origins


def allow(app: FastAPI, origins: Set[str]) -> None:
    """Handles preflight requests of these origins, and adds CORS headers to all their responses.

    It must be added last, since a browser sends no key with a preflight request.
    """
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=sorted(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
