"""Recognizes violations of the contract in the types, selections, logits and rows of a trial."""

import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jsparse
from jsparse.cache import CacheSpec
from jsparse.evaluation.policy_trial import PAGE, LayerSelection, TrialRows
from jsparse.policy import Policy
from jsparse.runtime.state_axes import state_axes
from jsparse.selection import Selection

CLOSE = 1e-4  # maximum differences from rounding, relative to the largest logit
# of the mass of a random selection; selection_mass.py has the measured shares
BLIND = 0.75


class Violation(Exception):
    """An observation that a rule forbids."""


def check_selection(selection: Selection, lengths: np.ndarray, where: str) -> None:
    """Raises Violation, naming `where`, unless the selection lists existing slots, in order."""
    ids, count = np.asarray(selection.ids), np.asarray(selection.count)
    unit = PAGE if selection.granularity == "page" else 1
    if count.shape != lengths.shape or (count < 0).any() or (count > ids.shape[-1]).any():
        raise Violation(f"count is {count.tolist()} for ids{list(ids.shape)} {where}")
    for at in np.ndindex(count.shape):
        listed, used = ids[at][: count[at]], -(-int(lengths[at]) // unit)
        rising = (np.diff(listed) > 0).all()
        if not rising or not ((listed >= 0) & (listed < used)).all():
            raise Violation(
                f"row {at[0]}, head {at[1]} lists {listed.tolist()} of {used} "
                f"{selection.granularity}s {where}"
            )
        if ids[at][count[at] :].any():
            raise Violation(f"ids past count are {ids[at].tolist()}, {count[at]} valid {where}")


def check_close(how: str, logits: Any, expected: Any, than: str = "before") -> None:
    """Raises Violation if logits differ by more than rounding; `how` and `than` name the two."""
    logits, expected = np.asarray(logits, np.float64), np.asarray(expected, np.float64)
    off = np.abs(logits - expected).max() / np.abs(expected).max()
    if not off <= CLOSE:
        raise Violation(f"logits {how} differ from {than} by {off:.1g} of the largest")


def check_mass(chosen: Sequence[LayerSelection]) -> str:
    """Returns the mass of selections as text; raises Violation if it is far below that of chance.

    Heads that attend to all tokens, or only to the newest, do not count.
    """
    tokens, mass = (
        np.stack([np.asarray(each) for each in shares])
        for shares in zip(*((one.tokens, one.mass) for one in chosen), strict=True)
    )
    some = (tokens > 0) & (tokens < 1)
    if not some.any():
        return ""
    chance, found = tokens[some].mean(), mass[some].mean()
    seen = (
        f"selects {chance:.0%} of the tokens before the newest, with {found:.0%} of their "
        "attention mass"
    )
    if not found >= BLIND * chance:
        raise Violation(f"{seen}; a random selection of the same size has {chance:.0%}")
    return seen


def row_arrays(
    policy: Policy, spec: CacheSpec, rows: TrialRows, row: int
) -> list[tuple[str, np.ndarray]]:
    """Returns the named arrays of a row, including its pages if rows do not share pages."""

    def part(array: Any, axis: int) -> np.ndarray:
        array = np.asarray(array)
        own = array.shape[axis] // spec.batch
        return np.take(array, range(row * own, (row + 1) * own), axis=axis)

    arrays = []
    leaves = jax.tree_util.tree_leaves_with_path(rows.state)
    for (path, leaf), at in zip(leaves, state_axes(policy, spec), strict=True):
        arrays.append((f"state{jax.tree_util.keystr(path)}", part(leaf, at.axis)))
    for nth, layer in enumerate(rows.cache.layers):
        own = {"k": layer.k, "v": layer.v, "lengths": layer.lengths}
        for path, leaf in jax.tree_util.tree_leaves_with_path(own):
            arrays.append((f"layers[{nth}]{jax.tree_util.keystr(path)}", part(leaf, 0)))
    return arrays


def leaves_out(chosen: LayerSelection) -> bool:
    """Returns whether some head attends to only a part of its tokens."""
    selection, lengths, *_ = chosen
    unit = PAGE if selection.granularity == "page" else 1
    part = np.asarray(selection.count) * unit < np.asarray(lengths)
    part |= selection.bits is not None
    return bool((part if selection.dense is None else part & ~np.asarray(selection.dense)).any())


def with_checked_types(policy: Policy) -> Policy:
    """Returns the policy with hooks that raise Violation if one changes the state's types."""

    def watch(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def watched(state: Any, *args: Any) -> Any:
            result = hook(state, *args)
            part = result
            if name in ("select", "maintain") and isinstance(result, tuple):
                part = result[2 if name == "select" else 0] if len(result) > 1 else result
            was, now = _types_of(state), _types_of(part)
            if was != now:
                raise Violation(f"{name} turns {_difference(was, now)}")
            return result

        return watched

    hooks = {
        name: watch(name, getattr(policy, name))
        for name in ("prefill", "append", "select", "update")
    }
    services = policy.services._replace(maintain=watch("maintain", policy.services.maintain))
    eviction = policy.eviction
    if eviction and eviction.reread:
        score = watch("reread", eviction.reread.score)
        eviction = eviction._replace(reread=eviction.reread._replace(score=score))
    return policy._replace(**hooks, services=services, eviction=eviction)


def _types_of(state: Any) -> dict[str, str]:
    """Returns shape and dtype of each array, or the type of any other leaf, by path."""
    return {
        f"state{jax.tree_util.keystr(path)}": f"{leaf.dtype}{list(leaf.shape)}"
        if hasattr(leaf, "dtype")
        else type(leaf).__name__
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def _difference(was: dict[str, str], now: dict[str, str]) -> str:
    """Describes the first array with a changed type."""
    for name in {**was, **now}:
        if was.get(name) != now.get(name):
            return f"{name} from {was.get(name, 'nothing')} into {now.get(name, 'nothing')}"
    return ""


def one_line(error: Exception) -> str:
    """Returns an error as one line, with its location in the policy's own code."""
    ours = str(Path(jsparse.__file__).parent), sysconfig.get_path("stdlib"), "<"
    text = " ".join(str(error).split())
    reason = f"{type(error).__name__}: {text[:300]}{'…' if len(text) > 300 else ''}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(ours) and "site-packages" not in frame.filename:
            return f"{reason} ({frame.filename}:{frame.lineno})"
    return reason
