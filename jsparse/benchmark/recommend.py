"""Finds the fastest policy for a model on this device that stays close to dense attention.

Steps of every candidate are timed as `jsparse bench latency` times them. Those that are faster than
dense attention's are then compared with it as `jsparse eval` does: by the KL divergence along the
same text, and by pass keys that the prompt's end or a later turn asks for. Everything measured is
kept in a journal as it comes, so that an interrupted run goes on where it stopped.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import jax

from jsparse import __version__
from jsparse.benchmark.steps import time_steps
from jsparse.evaluation.plan import Plan, Progress, plan, run
from jsparse.evaluation.shared_prefill import bundle
from jsparse.evaluation.store import Cell, Entry, ResultStore
from jsparse.hyper_parameters import whole_number
from jsparse.machine.folders import cache_folder
from jsparse.models.checkpoint import Params
from jsparse.policies.choices import Choice, known_as
from jsparse.policies.expressions import parse
from jsparse.runtime import capacity

STEPS, DENSE, REFUSED = "steps", "dense()", "refused"
KL, TURNS = "kl", ("passkey", "passkey_turn2")
NO_KL, NO_KEYS = "not compared with dense attention", "slower than the one to take"
# a step must be this much faster than dense attention's to be worth a difference in the text
MIN_GAIN = 1.02
PAGE_SIZE, MIN_LENGTH = 16, 512
OnPart = Callable[[str, int, int], Any]


class Requirements(NamedTuple):
    """Says what to measure, and how close to dense attention is close enough.

    Attributes:
        model: the name by which the model was loaded.
        context: the tokens in the cache of each sequence.
        batch: the sequences that decode together.
        policies: the candidates' expressions.
        kl: the greatest mean KL divergence from dense attention, in nats.
        exact: whether every greedy choice along the text must be dense attention's, too.
        samples: the texts, and the pass keys of each kind.
        steps: the decode steps per text.
    """

    model: str
    context: int
    batch: int
    policies: tuple[str, ...]
    kl: float = 0.02
    exact: bool = False
    samples: int = 8
    steps: int = 32


def candidates(context: int) -> list[str]:
    """Returns the expressions that are tried by default, with budgets for a context.

    They need neither training nor calibration, and run on every model. Those whose least budget is
    above what the context allows are left out.
    """
    eighth, quarter = (_whole_pages(context // parts) for parts in (8, 4))
    usual = [
        "twilight(all_pages(), p=0.95)",
        f"twilight(quest(budget={quarter}), p=0.95)",
        f"quest(budget={eighth})",
        f"dense_layers(quest(budget={eighth}), n=2)",
        f"dense_layers(quest(budget={quarter}), n=2)",
        f"double_sparsity(budget={_whole_pages(context // 16)})",
        f"lychee_cluster(budget={eighth})",
        "lfps(budget=0.04)",
        f"ada_kv(budget={quarter})",
        f"streaming(sink=4, recent={eighth - PAGE_SIZE})",
    ]
    return [expression for expression in usual if _builds(expression)]


def _builds(expression: str) -> bool:
    try:
        parse(expression)
    except ValueError:
        return False
    return True


def _whole_pages(tokens: int) -> int:
    return max(tokens // PAGE_SIZE, 2) * PAGE_SIZE


def checked(wanted: Requirements, longest: int) -> Requirements:
    """Returns what is wanted, with canonical names, once each and without dense attention.

    Raises:
        ValueError: a value is out of its range, or an expression is refused.
    """
    for name in ("context", "batch", "samples", "steps"):
        whole_number(name, getattr(wanted, name), 1)
    if not MIN_LENGTH <= wanted.context <= longest:
        raise ValueError(
            f"context={wanted.context}: must be from {MIN_LENGTH}, which pass keys need, to "
            f"{longest}, the model's maximum"
        )
    if not wanted.kl >= 0:
        raise ValueError(f"kl={wanted.kl}: must be a number of nats from 0 up")
    names = dict.fromkeys(parse(policy).name for policy in wanted.policies)
    asked = tuple(name for name in names if name != DENSE)
    if not asked:
        raise ValueError(f"policies={list(wanted.policies)}: must name one other than dense()")
    return wanted._replace(policies=asked)


def recommend(
    params: Params,
    wanted: Requirements,
    *,
    report: OnPart = lambda *_: None,
    tell: Callable[[str], Any] = lambda _: None,
) -> dict[str, Any]:
    """Measures the candidates and ranks them.

    Args:
        params: the model, which needs a tokenizer.
        wanted: what to measure.
        report: a callback with what is measured now, and the parts of it done and wanted.
        tell: a callback that gets sentences about the run, such as how long it will take.

    Returns:
        A dict of wanted, device, dtype, length (the tokens of the texts; 0 where no step was faster
        than dense attention's), rows (see `ranked`) and best, the first of them.

    Raises:
        ValueError: an argument is out of its range, or dense attention itself does not fit.
    """
    wanted = checked(wanted, params.config.max_position_embeddings)
    store = _store(params, wanted)
    resumed = bool(store.entries)
    if resumed:
        tell(f"An unfinished run goes on: {store.journal}")
    began = time.monotonic()
    _time(params, wanted, DENSE, store)
    of_one = time.monotonic() - began
    length = _longest(params, wanted)
    began = time.monotonic()
    first = _plan(wanted, [DENSE], TURNS[:1], length)._replace(samples=_rows(wanted))
    run(params, first, store)
    of_batch = time.monotonic() - began
    if not resumed:  # else nothing was measured now that could tell how long the rest takes
        tell(_outlook(params, wanted, length, of_one, of_batch))
    for nth, policy in enumerate(wanted.policies):
        report("decode steps", nth, len(wanted.policies))
        _time(params, wanted, policy, store)
    faster = _with(store, wanted, NO_KL)
    for group in _groups(params, wanted, faster, length):
        _compare(params, wanted, _plan(wanted, group, (KL,), length), store, report)
    # the fastest that loses none is the one to take: what is slower need not be asked
    while ranked(store.entries, wanted)[0]["policy"] == DENSE and (
        near := _with(store, wanted, NO_KEYS)
    ):
        _compare(params, wanted, _plan(wanted, near[:1], TURNS, length), store, report)
    rows = ranked(store.entries, wanted)
    measured = {
        "wanted": wanted._asdict(),
        "device": store.settings["device"],
        "dtype": store.settings["dtype"],
        "length": length if faster else 0,
        "rows": rows,
        "best": rows[0],
    }
    store.finish({"recommendation": measured})
    return measured


def choice(measured: Mapping[str, Any]) -> Choice:
    """Returns what `auto` is to know of a recommendation."""
    best, wanted = measured["best"], measured["wanted"]
    (dense,) = (row for row in measured["rows"] if row["policy"] == DENSE)
    return Choice(
        model=known_as(wanted["model"]),
        device=measured["device"],
        dtype=measured["dtype"],
        batch=wanted["batch"],
        context=wanted["context"],
        policy=best["policy"],
        ms=best["ms"],
        dense_ms=dense["ms"],
        kl=best["kl"],
        date=datetime.now(UTC).date().isoformat(),
    )


def ranked(entries: Sequence[Entry], wanted: Requirements) -> list[dict[str, Any]]:
    """Returns a dict for dense attention and each candidate, the ones to take first.

    Keys: policy; ms (per step); over_dense; kl and agreement, the means over the texts; found and
    lost, for each kind of pass key how many the policy finds and how many only dense attention; of,
    how many there are of each; verdict, why it is not to be taken, "" where it is. What was not
    measured is None: a policy that cannot run has no ms, one that is no faster has no kl, one that
    was not asked for pass keys has not found any number of them.
    """
    values: dict[tuple[str, str], dict[int, Mapping[str, float]]] = {}
    refused: dict[str, str] = {}
    for entry in entries:
        if entry["task"] == REFUSED:
            refused[entry["policy"]] = f"{REFUSED}: {entry['meta']['reason']}"
        else:
            of_cell = values.setdefault((entry["policy"], entry["task"]), {})
            of_cell[entry["index"]] = entry["values"]
    dense_ms = values[DENSE, STEPS][0]["ms"]
    rows = []
    for policy in (DENSE, *wanted.policies):
        timed = values.get((policy, STEPS), {}).get(0)
        row: dict[str, Any] = {
            "policy": policy,
            "ms": timed and timed["ms"],
            "over_dense": dense_ms / timed["ms"] if timed else 0.0,
            **_closeness(values.get((policy, KL), {}), of_dense=policy == DENSE),
            **_found(values, policy),
        }
        row["verdict"] = refused.get(policy) or _verdict(row, wanted)
        rows.append(row)
    return sorted(rows, key=lambda row: (bool(row["verdict"]), -row["over_dense"]))


def _closeness(texts: Mapping[int, Mapping[str, float]], *, of_dense: bool) -> dict[str, Any]:
    if of_dense:
        return {"kl": 0.0, "agreement": 1.0}
    names = ("kl", "agreement")
    return {
        name: sum(text[name] for text in texts.values()) / len(texts) if texts else None
        for name in names
    }


def _found(values: Mapping[tuple[str, str], Mapping[int, Any]], policy: str) -> dict[str, Any]:
    found, lost, of = {}, {}, 0
    for task in TURNS:
        own, dense = values.get((policy, task), {}), values.get((DENSE, task), {})
        of = max(of, len(own))
        found[task] = sum(sample["score"] == 1 for sample in own.values()) if own else None
        lost[task] = sum(own[i]["score"] < dense[i]["score"] for i in own if i in dense)
    return {"found": found, "lost": lost, "of": of}


def _verdict(row: Mapping[str, Any], wanted: Requirements) -> str:
    """Returns why a policy is not to be taken, or ""."""
    if row["policy"] == DENSE:
        return ""
    if row["ms"] is None:
        return "not measured yet"
    if row["over_dense"] < MIN_GAIN:
        return "no faster than dense attention"
    if row["kl"] is None:
        return NO_KL
    if wanted.exact and row["agreement"] < 1:
        return f"chooses another token at {1 - row['agreement']:.1%} of the places"
    if row["kl"] > wanted.kl:
        return f"KL above {wanted.kl:g}"
    if None in row["found"].values():
        return NO_KEYS
    for task, words in zip(TURNS, ("", " that a later turn asks for"), strict=True):
        if row["lost"][task]:
            return f"loses {row['lost'][task]} of {row['of']} pass keys{words}"
    return ""


def _with(store: ResultStore, wanted: Requirements, verdict: str) -> list[str]:
    """Returns the policies of which this is said, the fastest first."""
    rows = ranked(store.entries, wanted)
    return [row["policy"] for row in rows if row["verdict"] == verdict]


def _store(params: Params, wanted: Requirements) -> ResultStore:
    """Returns the journal of this run, with what an interrupted one has measured."""
    settings = wanted._asdict() | {
        "model": known_as(wanted.model),
        "device": jax.local_devices()[0].device_kind,
        "dtype": str(params.dtype),
        "versions": {"jsparse": __version__, "jax": jax.__version__},
    }
    del settings["kl"], settings["exact"]  # they judge what was measured
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_folder() / "recommend" / f"{digest}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # of a run that ended: what is asked for again is measured again
    return ResultStore(path, settings, resume=True)


def _time(params: Params, wanted: Requirements, policy: str, store: ResultStore) -> None:
    """Times a policy's steps, unless the journal has them, and notes why it cannot run."""
    cells = [Cell(policy, task, wanted.context) for task in (STEPS, REFUSED)]
    if not all(store.missing(cell, 1) for cell in cells):
        return
    try:
        made = time_steps(params, policy, batch=wanted.batch, context=wanted.context)
    except ValueError as error:
        if policy == DENSE:
            raise
        store.add([_refusal(policy, wanted, error)])
    else:
        of_step = {"ms": made["ms"]["median"], "attended": made["attended"]}
        store.add([Entry(**cells[0]._asdict(), index=0, values=of_step, meta={})])


def _compare(
    params: Params, wanted: Requirements, group: Plan, store: ResultStore, report: OnPart
) -> None:
    """Compares policies with dense attention; what one of them refuses does not touch others."""

    def update(now: Progress) -> None:
        report(f"closeness to dense attention: {now.part.tasks[0]}", now.part_done, now.part_total)

    try:
        run(params, group, store, update)
    except ValueError as error:
        alone = [policy for policy in group.policies if policy != DENSE]
        if len(alone) == 1:
            store.add([_refusal(alone[0], wanted, error)])
            return
        for policy in alone:
            _compare(params, wanted, group._replace(policies=(DENSE, policy)), store, report)


def _refusal(policy: str, wanted: Requirements, error: ValueError) -> Entry:
    cell = Cell(policy, REFUSED, wanted.context)
    return Entry(**cell._asdict(), index=0, values={}, meta={"reason": str(error)})


def _rows(wanted: Requirements) -> int:
    """Returns the texts per batch: several where that costs little memory."""
    return min(4 if wanted.context <= 2**13 else 1, wanted.samples)


def _plan(wanted: Requirements, policies: Sequence[str], names: Sequence[str], length: int) -> Plan:
    sizes = {"batch": _rows(wanted), "steps": min(wanted.steps, length - 2)}
    return plan(policies, names, [length], wanted.samples, **sizes)


def _longest(params: Params, wanted: Requirements) -> int:
    """Returns the greatest length of texts up to the context of which the memory holds two batches.

    Raises:
        ValueError: there is not enough for the shortest texts.
    """
    length = wanted.context
    while not _fits(params, wanted, [DENSE], length):
        length //= 2
        if length < MIN_LENGTH:
            raise ValueError(
                f"context={wanted.context}: must leave memory for texts of {MIN_LENGTH} tokens"
            )
    return length


def _fits(params: Params, wanted: Requirements, policies: Sequence[str], length: int) -> bool:
    """Returns whether prompts read for all these policies fit, beside a copy for one to decode."""
    spec = capacity.cache_spec(params, [[]] * _rows(wanted), length, None, PAGE_SIZE)
    bundled = bundle(tuple(map(parse, policies)))
    return capacity.fits(spec._replace(batch=2 * spec.batch), bundled)


def _groups(
    params: Params, wanted: Requirements, policies: Sequence[str], length: int
) -> Iterator[list[str]]:
    """Yields the policies in groups that fit in memory together, to read each prompt once for."""
    group: list[str] = []
    for policy in policies:
        if group and not _fits(params, wanted, [*group, policy], length):
            yield group
            group = []
        group.append(policy)
    if group:
        yield group


def _outlook(
    params: Params, wanted: Requirements, length: int, of_one: float, of_batch: float
) -> str:
    """Says what will be measured, and about how long that takes.

    `of_one` are the seconds that dense steps took, compiling among them, `of_batch` those of one
    batch of texts.
    """
    count = len(wanted.policies)
    groups = len(list(_groups(params, wanted, wanted.policies, length)))
    batches = -(-wanted.samples // _rows(wanted)) * (1 + len(TURNS))
    minutes = round((count * of_one + batches * groups * of_batch) / 60)
    return (
        f"Timing steps of {count} policies at {wanted.batch} x {wanted.context} tokens, then "
        f"comparing the faster ones with dense attention on {wanted.samples} texts and "
        f"{len(TURNS) * wanted.samples} pass keys of {length} tokens: about "
        f"{f'{minutes} minutes' if minutes > 1 else 'a minute'}. What is measured is kept if you "
        "interrupt it."
    )
