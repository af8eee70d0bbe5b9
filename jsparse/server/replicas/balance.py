"""Chooses the replica for a request: one with its prefix cached, or the least busy one.

Only the router's own record of requests counts, so that it never has to query replicas.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, NamedTuple

# Requests share K and V if their prompts agree in this number of first characters or tokens.
PREFIX_CHARS, PREFIX_TOKENS = 2048, 512
CHARS_PER_TOKEN = 4
# the most prefixes to remember; the least recently used one is dropped first
MAX_PREFIXES = 2**16
# the estimated tokens of a completion if its request sets no number
UNKNOWN_TOKENS = 256
# how much busier than the least busy replica the one with the cached prefix may be
FACTOR = 2


class Work(NamedTuple):
    """An estimate of a request's tokens, and a hash of its first prompt's long prefix."""

    tokens: int
    prefix: bytes | None


def work_of(body: Any) -> Work:
    """Returns the work of a request with this body, which may be malformed."""
    if not isinstance(body, dict):
        return Work(0, None)
    given = body.get("messages") or body.get("prompt")
    if isinstance(given, list) and given and not isinstance(given[0], int | dict):
        prompts = [*map(_plain, given)]
    else:
        prompts = [_plain(given)]
    new = _count(body, "n", 1) * _count(
        body, "max_completion_tokens", _count(body, "max_tokens", UNKNOWN_TOKENS)
    )
    if body.get("tools") and body.get("tool_choice") != "none":
        prompts = [f"{body['tools']!r}{prompts[0]}"]  # templates write tools first
    first = prompts[0]
    size = PREFIX_CHARS if isinstance(first, str) else PREFIX_TOKENS
    whole = len(first) >= size
    known = repr((body.get("cache_salt"), first[:size])).encode()
    prefix = blake2b(known, digest_size=16).digest() if whole else None
    return Work(sum(_tokens(prompt) + new for prompt in prompts), prefix)


def _plain(prompt: Any) -> str | list[Any]:
    """Returns a prompt as text or as ids; messages as one text."""
    if isinstance(prompt, list):
        messages = bool(prompt) and isinstance(prompt[0], dict)
        return repr(prompt) if messages else prompt
    return prompt if isinstance(prompt, str) else ""


def _tokens(prompt: str | list[Any]) -> int:
    return len(prompt) // CHARS_PER_TOKEN if isinstance(prompt, str) else len(prompt)


def _count(body: dict[str, Any], name: str, default: int) -> int:
    value = body.get(name)
    return value if isinstance(value, int) and value > 0 else default


class Balance:
    """The pending work of each replica, and the prefixes that it has cached."""

    def __init__(self, replicas: int) -> None:
        self._tokens, self._sent = [0] * replicas, [0] * replicas
        self._homes: OrderedDict[bytes, list[int]] = OrderedDict()

    def choose(self, work: Work, among: Sequence[int]) -> int:
        """Returns the least busy replica, or one with the prefix that is not much busier."""
        least = min(among, key=self._load)
        known = [nth for nth in self._homes.get(work.prefix or b"", ()) if nth in among]
        if known:
            home = min(known, key=self._load)
            if self._tokens[home] <= FACTOR * self._tokens[least] + work.tokens:
                return home
        return least

    @contextmanager
    def sent(self, work: Work, replica: int) -> Iterator[None]:
        """Counts a request while a replica works on it."""
        if work.prefix is not None:
            homes = self._homes.setdefault(work.prefix, [])
            if replica not in homes:
                homes.append(replica)
            self._homes.move_to_end(work.prefix)
            while len(self._homes) > MAX_PREFIXES:
                self._homes.popitem(last=False)
        self._tokens[replica] += work.tokens
        self._sent[replica] += 1
        try:
            yield
        finally:
            self._tokens[replica] -= work.tokens

    def forget(self, replica: int) -> None:
        """Forgets the prefixes of a replica, which restarts."""
        for prefix in [prefix for prefix, homes in self._homes.items() if replica in homes]:
            self._homes[prefix].remove(replica)
            if not self._homes[prefix]:
                del self._homes[prefix]

    def _load(self, replica: int) -> tuple[int, int]:
        """Returns a replica's pending tokens, and its total requests, which decide ties."""
        return self._tokens[replica], self._sent[replica]
