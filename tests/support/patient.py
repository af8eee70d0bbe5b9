"""Sends requests like httpx, but with a longer timeout than its five seconds.

A busy machine may compile a program in the meantime.
"""

from functools import partial

import httpx

SECONDS = 60
get, post, options, request, stream = (
    partial(getattr(httpx, name), timeout=SECONDS)
    for name in ("get", "post", "options", "request", "stream")
)
