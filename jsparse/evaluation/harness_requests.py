"""Prepares requests of lm-evaluation-harness: options, windows, truncation and batches."""

import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from jsparse.runtime.sampling_params import OFF

_log = logging.getLogger(__name__)

TokenizedPair = tuple[tuple[str, str] | None, list[int], list[int]]
"""A request's texts (None for a window of a text), and the ids of context and continuation."""


def generation_options(
    arguments: dict[str, Any], *, max_gen_toks: int, max_length: int
) -> dict[str, Any]:
    """Converts a request's arguments to options of `jsparse.generate`; missing options are off.

    `max_gen_toks` is the number of new tokens for requests without one, `max_length` the maximum of
    context and output together.

    Raises:
        ValueError: an argument is unknown or out of range.
    """
    options: dict[str, Any] = {**normalize_gen_kwargs(arguments, max_gen_toks)}
    del options["do_sample"]  # already applied to the temperature
    stop = [text for text in options.pop("until") if text]
    new_tokens = positive_integer("max_gen_toks", options.pop("max_gen_toks"))
    if unknown := options.keys() - OFF.keys():
        known = ("until", "max_gen_toks", "do_sample", *OFF)
        raise ValueError(
            f"generation arguments {sorted(unknown)}: must be among {', '.join(known)}"
        )
    if new_tokens >= max_length:
        raise ValueError(f"max_gen_toks={new_tokens}: must be less than max_length={max_length}")
    return OFF | options | {"max_new_tokens": new_tokens, "stop": stop}


def continuation_lengths(requests: Sequence[TokenizedPair], max_length: int) -> list[int]:
    """Returns the number of tokens of each continuation; ValueError unless 1 to max_length."""
    counts = [len(continuation) for _, _, continuation in requests]
    for (texts, _, _), count in zip(requests, counts, strict=True):
        if not 1 <= count <= max_length:
            raise ValueError(
                f"{texts!r}: the continuation has {count} tokens, must have 1 to {max_length}"
            )
    return counts


def text_windows(ids: list[int], prefix_token_id: int, max_length: int) -> list[TokenizedPair]:
    """Cuts a text into disjoint windows; each token is in the continuation of one."""
    windows = get_rolling_token_windows(ids, prefix_token_id, max_length, context_len=1)
    return [(None, *make_disjoint_window(window)) for window in windows]


def cut_to_fit(rows: list[list[int]], rooms: list[int], max_length: int) -> list[list[int]]:
    """Returns the last tokens of each row that fit its room; warns about dropped tokens."""
    lost = [len(ids) - room for ids, room in zip(rows, rooms, strict=True) if len(ids) > room]
    if lost:
        _log.warning(
            "%d of %d texts do not fit in max_length=%d and are cut from the left: %d tokens "
            "are lost, up to %d of a text",
            len(lost),
            len(rows),
            max_length,
            sum(lost),
            max(lost),
        )
    return [ids[-room:] for ids, room in zip(rows, rooms, strict=True)]


def equal_batches(
    rows: list[list[int]],
    batch_size: int,
    label: str,
    disable_tqdm: bool,
    options: Sequence[Any] | None = None,
) -> Iterator[list[int]]:
    """Yields the indices of rows with equal options, the longest first, in batches of one size.

    The last batch is padded by repetition. `label` is shown at the progress bar.
    """
    size = min(batch_size, len(rows))
    names = [repr(each) for each in options or [None] * len(rows)]
    order = sorted(range(len(rows)), key=lambda i: (names[i], -len(rows[i])))
    with tqdm(total=len(rows), desc=label, disable=disable_tqdm) as bar:
        for _, equal in itertools.groupby(order, key=lambda i: names[i]):
            for places in itertools.batched(equal, size):
                yield [*places, *places[-1:] * (size - len(places))]
                bar.update(len(places))


def positive_integer(name: str, value: int | str) -> int:
    """Checks a positive integer, which the harness' command passes as text."""
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"{name}={value!r}: must be an integer of at least 1")
    return number
