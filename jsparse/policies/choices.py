"""Stores the policies that were measured to be best, by device and model, for `auto`.

`jsparse recommend` writes these choices to one JSON file, choices.json in `cache_folder`.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from jsparse.cache import CacheSpec
from jsparse.machine.folders import cache_folder

# a choice applies to capacities in this range, relative to the measured context: the budgets of
# policies are numbers of tokens
MIN_SHARE, MAX_SHARE = 1 / 2, 5 / 4


class Choice(NamedTuple):
    """The best policy for a model on a device, with its measurement.

    Attributes:
        model: the model, as `known_as` names it.
        device: the device, as jax names its kind.
        dtype: the type of weights and cache.
        batch: the number of sequences that decoded together.
        context: the tokens in the cache of each sequence.
        policy: the expression of the fastest policy that was close enough to dense attention;
            "dense()" if none was faster.
        ms: milliseconds per decode step.
        dense_ms: those of dense attention in the same run.
        kl: the mean KL divergence from dense attention, in nats.
        date: the day of the measurement, in ISO 8601.
    """

    model: str
    device: str
    dtype: str
    batch: int
    context: int
    policy: str
    ms: float
    dense_ms: float
    kl: float
    date: str

    def __str__(self) -> str:
        times = self.dense_ms / self.ms
        found = f"{times:.2f} times as fast as dense attention, KL {self.kl:.2g}"
        return (
            f"measured by `jsparse recommend` on {self.date}, {self.batch} x {self.context} "
            f"tokens: {'nothing faster was close enough' if times == 1 else found}"
        )


def file() -> Path:
    """Returns the file that holds all choices."""
    return cache_folder() / "choices.json"


def known_as(model: str) -> str:
    """Returns the name under which a model is stored: a full path, or a Hub id unchanged.

    A model without a name keeps the empty name; its path would be the working folder's.
    """
    return str(Path(model).resolve()) if model and Path(model).exists() else model


def find(spec: CacheSpec, device: str) -> Choice | None:
    """Returns the choice for a cache of these sizes, with the largest batch up to the cache's.

    Among several contexts, the shortest that fits is used.
    """
    name, dtype = known_as(spec.model), spec.types or str(spec.dtype)
    fitting = [
        choice
        for choice in stored()
        if (choice.model, choice.device, choice.dtype) == (name, device, dtype)
        and choice.batch <= spec.batch
        and MIN_SHARE * choice.context < spec.capacity <= MAX_SHARE * choice.context
    ]
    return max(fitting, key=lambda choice: (choice.batch, -choice.context), default=None)


def stored() -> list[Choice]:
    """Returns all choices.

    Raises:
        ValueError: the file was not written by `keep`.
    """
    try:
        text = file().read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    try:
        return [_choice(entry) for entry in json.loads(text)]
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{file()} was not written by `jsparse recommend` ({error}): must be removed"
        ) from None


def keep(choices: Iterable[Choice]) -> None:
    """Writes choices to the file; each replaces the one of the same sizes, if any."""
    kept = {choice[:5]: choice for choice in [*stored(), *choices]}
    path = file()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    lines = ",\n".join(json.dumps(choice._asdict()) for choice in kept.values())
    temporary.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    os.replace(temporary, path)


def _choice(entry: Any) -> Choice:
    choice = Choice(**entry)
    for value, kind in zip(choice, Choice.__annotations__.values(), strict=True):
        if not isinstance(value, int if kind is float else kind) and not isinstance(value, kind):
            raise ValueError(f"{value!r} must be of type {kind.__name__}")
    return choice
