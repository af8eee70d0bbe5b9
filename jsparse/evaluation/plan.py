"""Runs the evaluation: batches of samples for every task and length.

All policies share the prefill of each prompt.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jsparse.builder import dense
from jsparse.evaluation import tasks, texts
from jsparse.evaluation.evaluators import (
    DRAFTS,
    MEASURES,
    Comparison,
    Drafting,
    GreedyAnswers,
    SampleValues,
)
from jsparse.evaluation.store import Cell, Entry, ResultStore
from jsparse.evaluation.tasks.questions import MAX_NEW_TOKENS
from jsparse.models.checkpoint import Params
from jsparse.policies.expressions import as_policy
from jsparse.text.prompts import tokenizer_of

OnSample = Callable[["Progress"], Any]


class Plan(NamedTuple):
    """The measurements of a run.

    Attributes:
        policies: expressions of policies; dense() is the reference and comes first.
        tasks: names from `MEASURES` or `tasks.TASKS`.
        lengths: total prompt and new tokens; open-ended tasks have their own.
        samples: the number of samples per task and length.
        batch: the number of prompts per batch.
        steps: the number of decode steps per sample of a measure.
        chat: whether a task's prompt is sent as a user's message to a chat model.
        text: the UTF-8 text of the measures, or a folder of several, from which samples are taken
            in turn; None: the included one.
        files: the folder of the files that some tasks need; see `tasks.parse`.
        yardstick: whether "kl" is also compared with the oracle of `jsparse.evaluation.yardstick`.
        max_new_tokens: the maximum tokens per answer of open-ended tasks.
    """

    policies: tuple[str, ...]
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    samples: int
    batch: int = 8
    steps: int = 64
    chat: bool = False
    text: Path | None = None
    files: Path | None = None
    yardstick: bool = False
    max_new_tokens: int = MAX_NEW_TOKENS


def plan(
    policies: Sequence[str], names: Sequence[str], lengths: Sequence[int], samples: int, **more: Any
) -> Plan:
    """Builds a checked plan: policies by their full names, dense() first.

    Raises:
        ValueError: a name is unknown or given twice, or a value is out of range.
    """
    chosen = dict.fromkeys([dense().name, *(as_policy(policy).name for policy in policies)])
    result = Plan(tuple(chosen), tuple(names), tuple(lengths), samples, **more)
    for name in ("samples", "batch", "steps", "max_new_tokens"):
        if getattr(result, name) < 1:
            raise ValueError(f"{name}={getattr(result, name)}: must be at least 1")
    if (
        not result.lengths
        or min(result.lengths) < 1
        or len(set(result.lengths)) < len(result.lengths)
    ):
        raise ValueError(
            f"lengths={list(result.lengths)}: must be positive numbers of tokens, each once"
        )
    known = [*MEASURES, *tasks.TASKS]
    for i, name in enumerate(result.tasks):
        if name not in known or name in result.tasks[:i]:
            raise ValueError(f"task {name!r}: must be one of {', '.join(known)}, given once")
    if result.yardstick and "kl" not in result.tasks:
        raise ValueError(
            f"tasks={list(result.tasks)}: must have kl among them to measure yardsticks"
        )
    return result


def run(params: Params, plan: Plan, store: ResultStore, report: OnSample = lambda _: None) -> None:
    """Measures the samples that the store lacks; each batch is on disk when it ends.

    `report` receives the progress before each batch and after the last of a part.

    Raises:
        ValueError: the model has no tokenizer, a length exceeds its maximum, or a file is missing.
    """
    parts, done = list(_parts(params, plan)), len(store.entries)
    total = sum(len(plan.policies) * len(part.tasks) * part.samples for part in parts)
    for part in parts:
        cells = [Cell(policy, task, part.length) for task in part.tasks for policy in plan.policies]
        lacking = {cell: set(store.missing(cell, part.samples)) for cell in cells}
        indices = sorted(set().union(*lacking.values()))
        before, new = done, sum(map(len, lacking.values()))
        for start in range(0, len(indices), plan.batch):
            report(Progress(done, total, part, done - before, new))
            batch = indices[start : start + plan.batch]
            lack = {cell.policy for cell in cells if lacking[cell] & set(batch)}
            policies = [policy for policy in plan.policies if policy in lack]
            entries = [
                Entry(**cell._asdict(), index=index, values=values, meta=meta)
                for task, rows in zip(part.tasks, part.measure(policies, batch), strict=True)
                for policy, row in zip(policies, rows, strict=True)
                for index, (values, meta) in zip(batch, row, strict=True)
                if index in lacking[cell := Cell(policy, task, part.length)]
            ]
            store.add(entries)
            done += len(entries)
        report(Progress(done, total, part, done - before, new))


class Part(NamedTuple):
    """Tasks that are measured together at one length."""

    tasks: tuple[str, ...]
    length: int
    samples: int
    measure: Callable[[Sequence[str], Sequence[int]], list[SampleValues]]


class Progress(NamedTuple):
    """Numbers of samples of a policy and task: all stored ones, and this run's of a part."""

    done: int
    total: int
    part: Part
    part_done: int
    part_total: int


def _parts(params: Params, plan: Plan) -> Iterator[Part]:
    for measure in _measures(params, plan):
        there = measure.samples
        samples = plan.samples if there is None else min(plan.samples, there)
        yield Part(measure.tasks, measure.length, samples, measure)


def _measures(params: Params, plan: Plan) -> Iterator[Comparison | Drafting | GreedyAnswers]:
    tokenizer = tokenizer_of(params, "the evaluation")
    built = {
        name: tasks.parse(name, plan.files, plan.max_new_tokens)[0]
        for name in plan.tasks
        if name not in MEASURES
    }
    maximum = params.config.max_position_embeddings
    if any(name in MEASURES or not built[name].open_ended for name in plan.tasks):
        for length in plan.lengths:
            if length > maximum:
                raise ValueError(f"length={length}: must be at most {maximum}, the model's maximum")
    text = {}
    if set(plan.tasks) & set(MEASURES):
        text = {name: tokenizer.encode(read) for name, read in texts.read_all(plan.text).items()}
    for name in plan.tasks:
        if name == DRAFTS:
            for length in plan.lengths:
                yield Drafting(params, length, text, plan.steps, plan.batch)
        elif name in MEASURES:
            for length in plan.lengths:
                yield Comparison(params, name, length, text, plan.steps, plan.batch, plan.yardstick)
        else:
            for length in (None,) if built[name].open_ended else plan.lengths:
                yield GreedyAnswers(params, tokenizer, built[name], length, plan.batch, plan.chat)
