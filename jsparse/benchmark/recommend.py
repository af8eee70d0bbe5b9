"""Finds the fastest policy for a model on this device that stays close to dense attention.

Steps of every candidate are timed as in `jsparse bench latency`. Candidates that are faster than
dense attention are then compared with it as in `jsparse eval`: by the KL divergence along the same
text, and by pass keys that the prompt's end or a later turn asks for. All measurements go to a
journal immediately, so that an interrupted run resumes where it stopped.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import jax

from jsparse import __version__
from jsparse.benchmark.ranking import KL, NO_KEYS, NO_KL, REFUSED, STEPS, TURNS, ranked
from jsparse.benchmark.requirements import DENSE, MIN_LENGTH, PAGE_SIZE, Requirements, checked
from jsparse.benchmark.steps import time_steps
from jsparse.builder import dense
from jsparse.evaluation.plan import Plan, Progress, plan, run
from jsparse.evaluation.shared_prefill import bundle
from jsparse.evaluation.store import Cell, Entry, ResultStore
from jsparse.machine.folders import cache_folder
from jsparse.models.checkpoint import Params, require_on_one_device
from jsparse.policies.choices import Choice, known_as
from jsparse.policies.expressions import parse
from jsparse.runtime import capacity
from jsparse.text.short_names import short_name

# How much longer a CPU compiles a policy's steps than dense attention's: on SmolLM2, 28 CPU seconds
# with quest against 8.
CPU_COMPILING = 3

OnPart = Callable[[str, int, int], Any]


def recommend(
    params: Params,
    requirements: Requirements,
    *,
    report: OnPart = lambda *_: None,
    notify: Callable[[str], Any] = lambda _: None,
) -> dict[str, Any]:
    """Measures the candidates and ranks them.

    `report` receives the current measurement and its finished and total parts; `notify` receives
    sentences about the run.

    Returns:
        A dict of wanted, device, dtype, length (the tokens of the texts; 0 if no step was faster
        than dense attention's), rows (see `ranked`) and best, the first of them.

    Raises:
        ValueError: an argument is out of range, the model is spread over devices, or dense
            attention itself does not fit.
    """
    require_on_one_device(params)
    requirements = checked(requirements, params.config.max_position_embeddings)
    store = _store(params, requirements)
    try:
        return _measured(params, requirements, store, report, notify)
    except KeyboardInterrupt:
        notify(
            f"Interrupted: {len(store.entries)} measurements are kept, and the same command "
            "continues from there."
        )
        raise


def _measured(
    params: Params,
    requirements: Requirements,
    store: ResultStore,
    report: OnPart,
    notify: Callable[[str], Any],
) -> dict[str, Any]:
    """Measures the missing entries; arguments and result are as for `recommend`."""
    resumed = bool(store.entries)
    if resumed:
        notify(f"Continuing an unfinished run: {store.journal}")
    else:
        notify("Measuring dense attention first, to estimate how long the rest takes.")
    report("dense attention", 0, 2)
    began = time.monotonic()
    _time(params, requirements, DENSE, store)
    of_one = time.monotonic() - began
    length = _longest(params, requirements)
    report("dense attention", 1, 2)
    began = time.monotonic()
    first = _plan(requirements, [DENSE], TURNS[:1], length)._replace(samples=_rows(requirements))
    run(params, first, store)
    of_batch = time.monotonic() - began
    if not resumed:  # otherwise no new measurement predicts how long the rest takes
        notify(_outlook(params, requirements, length, of_one, of_batch))
    for nth, policy in enumerate(requirements.policies):
        report(f"decode steps of {short_name(policy)}", nth, len(requirements.policies))
        _time(params, requirements, policy, store)
        notify(_timed(store, policy))
    faster = _with(store, requirements, NO_KL)
    for group in _groups(params, requirements, faster, length):
        _compare(params, requirements, _plan(requirements, group, (KL,), length), store, report)
    # the fastest one without losses is the result: slower ones need no pass keys
    while ranked(store.entries, requirements)[0]["policy"] == DENSE and (
        near := _with(store, requirements, NO_KEYS)
    ):
        _compare(params, requirements, _plan(requirements, near[:1], TURNS, length), store, report)
    rows = ranked(store.entries, requirements)
    measured = {
        "wanted": requirements._asdict(),
        "device": store.settings["device"],
        "dtype": store.settings["dtype"],
        "length": length if faster else 0,
        "rows": rows,
        "best": rows[0],
    }
    store.finish({"recommendation": measured})
    return measured


def choice(measured: Mapping[str, Any]) -> Choice:
    """Returns the entry of a recommendation that `auto` reads."""
    best, requirements = measured["best"], measured["wanted"]
    (dense,) = (row for row in measured["rows"] if row["policy"] == DENSE)
    return Choice(
        model=known_as(requirements["model"]),
        device=measured["device"],
        dtype=measured["dtype"],
        batch=requirements["batch"],
        context=requirements["context"],
        policy=best["policy"],
        ms=best["ms"],
        dense_ms=dense["ms"],
        kl=best["kl"],
        date=datetime.now(UTC).date().isoformat(),
    )


def _with(store: ResultStore, requirements: Requirements, verdict: str) -> list[str]:
    """Returns the policies with this verdict, the fastest first."""
    rows = ranked(store.entries, requirements)
    return [row["policy"] for row in rows if row["verdict"] == verdict]


def _store(params: Params, requirements: Requirements) -> ResultStore:
    """Returns the journal of this run, with the measurements of an interrupted one."""
    settings = requirements._asdict() | {
        "model": known_as(requirements.model),
        "device": jax.local_devices()[0].device_kind,
        "dtype": params.types,
        "versions": {"jsparse": __version__, "jax": jax.__version__},
    }
    del settings["kl"], settings["exact"]  # they affect only verdicts, not measurements
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_folder() / "recommend" / f"{digest}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # of a completed run: a second request measures again
    return ResultStore(path, settings, resume=True)


def _time(params: Params, requirements: Requirements, policy: str, store: ResultStore) -> None:
    """Times a policy's steps, unless the journal has them, and records why it cannot run."""
    cells = [Cell(policy, task, requirements.context) for task in (STEPS, REFUSED)]
    if not all(store.missing(cell, 1) for cell in cells):
        return
    try:
        timing = time_steps(params, policy, batch=requirements.batch, context=requirements.context)
    except ValueError as error:
        if policy == DENSE:
            raise
        store.add([_refusal(policy, requirements, error)])
    else:
        of_step = {"ms": timing["ms"]["median"], "attended": timing["attended"]}
        store.add([Entry(**cells[0]._asdict(), index=0, values=of_step, meta={})])


def _timed(store: ResultStore, policy: str) -> str:
    """Returns a line on the steps of a policy."""
    ms = {
        entry["policy"]: entry["values"]["ms"] for entry in store.entries if entry["task"] == STEPS
    }
    if policy not in ms:
        return f"{short_name(policy)}: cannot run here"
    return f"{short_name(policy)}: {ms[policy]:.3g} ms a step, dense attention {ms[DENSE]:.3g}"


def _compare(
    params: Params, requirements: Requirements, group: Plan, store: ResultStore, report: OnPart
) -> None:
    """Compares policies with dense attention; an error in one does not stop the others."""

    def update(now: Progress) -> None:
        report(f"closeness to dense attention: {now.part.tasks[0]}", now.part_done, now.part_total)

    try:
        run(params, group, store, update)
    except ValueError as error:
        alone = [policy for policy in group.policies if policy != DENSE]
        if len(alone) == 1:
            store.add([_refusal(alone[0], requirements, error)])
            return
        for policy in alone:
            _compare(params, requirements, group._replace(policies=(DENSE, policy)), store, report)


def _refusal(policy: str, requirements: Requirements, error: ValueError) -> Entry:
    cell = Cell(policy, REFUSED, requirements.context)
    return Entry(**cell._asdict(), index=0, values={}, meta={"reason": str(error)})


def _rows(requirements: Requirements) -> int:
    """Returns the texts per batch: several if that needs little memory."""
    return min(4 if requirements.context <= 2**13 else 1, requirements.samples)


def _plan(
    requirements: Requirements, policies: Sequence[str], names: Sequence[str], length: int
) -> Plan:
    sizes = {"batch": _rows(requirements), "steps": min(requirements.steps, length - 2)}
    return plan(policies, names, [length], requirements.samples, **sizes)


def _longest(params: Params, requirements: Requirements) -> int:
    """Returns the maximum length of texts, up to the context, at which two batches fit."""
    length = requirements.context
    while not _fits(params, requirements, [DENSE], length):
        length //= 2
        if length < MIN_LENGTH:
            raise ValueError(
                f"context={requirements.context}: must leave memory for texts of {MIN_LENGTH} "
                "tokens"
            )
    return length


def _fits(params: Params, requirements: Requirements, policies: Sequence[str], length: int) -> bool:
    """Returns whether prompts for all these policies fit, plus a copy for one to decode."""
    spec = capacity.cache_spec(params, [[]] * _rows(requirements), length, None, PAGE_SIZE)
    bundled = bundle(tuple(map(parse, policies)))
    doubled = spec._replace(batch=2 * spec.batch)
    reference = doubled._replace(kv_cache_dtype="auto")  # whose cache precedes the others
    return capacity.fits(doubled, bundled) and capacity.fits(reference, dense())


def _groups(
    params: Params, requirements: Requirements, policies: Sequence[str], length: int
) -> Iterator[list[str]]:
    """Yields groups of policies that fit in memory together, so that they share each prefill."""
    group: list[str] = []
    for policy in policies:
        if group and not _fits(params, requirements, [*group, policy], length):
            yield group
            group = []
        group.append(policy)
    if group:
        yield group


def _outlook(
    params: Params, requirements: Requirements, length: int, of_one: float, of_batch: float
) -> str:
    """Describes the remaining measurements and their time, from that of dense steps and a batch."""
    count = len(requirements.policies)
    steps = f"steps of {count} policies" if count > 1 else "steps of one policy"
    groups = len(list(_groups(params, requirements, requirements.policies, length)))
    batches = -(-requirements.samples // _rows(requirements)) * (1 + len(TURNS))
    of_policy = of_one * (CPU_COMPILING if jax.default_backend() == "cpu" else 1)
    minutes = round((count * of_policy + batches * groups * of_batch) / 60)
    return (
        f"Timing {steps} at {requirements.batch} x {requirements.context} "
        "tokens, then comparing the faster ones with dense attention on "
        f"{requirements.samples} texts and {len(TURNS) * requirements.samples} pass keys of "
        f"{length} tokens: about {f'{minutes} minutes' if minutes > 1 else 'a minute'}. If you "
        "interrupt it, completed work is kept."
    )
