"""Chooses the replica that answers a request: the one that knows its beginning, or has least to do.

Only what the router itself has sent counts, so that no replica has to be asked.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, NamedTuple

# Requests whose prompts begin with so many characters, or so many tokens, in common share K and V.
PREFIX_CHARS, PREFIX_TOKENS = 2048, 512
CHARS_PER_TOKEN = 4
# the beginnings that are remembered, of which the one that was used least recently goes first
MAX_PREFIXES = 2**16
# answers that name no number of tokens count as so many
UNKNOWN_TOKENS = 256
# how much more than another a replica may have to do and still get what it knows the beginning of
FACTOR = 2


class Work(NamedTuple):
    """About how many tokens a request has, and a hash of its first prompt's long prefix."""

    tokens: int
    prefix: bytes | None


def work_of(body: Any) -> Work:
    """Returns the work of a request with this body, which may be malformed."""
    if not isinstance(body, dict):
        return Work(0, None)
    asked = body.get("messages") or body.get("prompt")
    if isinstance(asked, list) and asked and not isinstance(asked[0], int | dict):
        prompts = [*map(_plain, asked)]
    else:
        prompts = [_plain(asked)]
    new = _count(body, "n", 1) * _count(
        body, "max_completion_tokens", _count(body, "max_tokens", UNKNOWN_TOKENS)
    )
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
    """Counts what each replica has to do, and remembers which beginnings it has read."""

    def __init__(self, replicas: int) -> None:
        self._tokens, self._sent = [0] * replicas, [0] * replicas
        self._homes: OrderedDict[bytes, list[int]] = OrderedDict()

    def choose(self, work: Work, among: Sequence[int]) -> int:
        """Returns the replica with least to do, or one with the prefix and not much more to do."""
        least = min(among, key=self._load)
        known = [nth for nth in self._homes.get(work.prefix or b"", ()) if nth in among]
        if known:
            home = min(known, key=self._load)
            if self._tokens[home] <= FACTOR * self._tokens[least] + work.tokens:
                return home
        return least

    @contextmanager
    def sent(self, work: Work, replica: int) -> Iterator[None]:
        """Counts a request that a replica works on meanwhile."""
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
        """Forgets what a replica has read: it begins anew."""
        for prefix in [prefix for prefix, homes in self._homes.items() if replica in homes]:
            self._homes[prefix].remove(replica)
            if not self._homes[prefix]:
                del self._homes[prefix]

    def _load(self, replica: int) -> tuple[int, int]:
        """Returns what a replica has to do, and has had, which decides between two with as much."""
        return self._tokens[replica], self._sent[replica]
