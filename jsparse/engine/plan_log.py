"""Logs an engine's requests and plans, and replays them bit for bit.

A log is a file of JSON lines: one on the engine, then one per requested answer, per plan, and per
finished answer. Plans hold no results, so a replay repeats the device's work, without the scheduler
and its clock.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jsparse.engine.outputs import AnswerBuilder
from jsparse.engine.setup import EngineSpec
from jsparse.engine.step_plan import Chunk, Decode, Decoding, Family, Move, Reading, StepPlan
from jsparse.runtime.request import Request
from jsparse.runtime.sampling_params import SamplingParams


class PlanLog:
    """Writes a log, line by line: a crash loses no complete line."""

    def __init__(self, file: str | os.PathLike[str], spec: EngineSpec) -> None:
        """Begins a log with a description of the engine."""
        self._path = Path(file)
        self._path.write_text("", encoding="utf-8")
        engine = {
            "model": spec.params.name,
            "policy": spec.policy.name,
            "dtype": spec.params.types,
            "sizes": spec.sizes._asdict(),
            "per_request": spec.knobs,
            "layer_stats": spec.layer_stats,
        }
        self._write(engine=engine)

    def asked(self, number: int, request: Request) -> None:
        """Writes the request of an answer."""
        self._write(
            answer=number,
            ids=request.ids.tolist(),
            sampling=dataclasses.asdict(request.sampling),
            ends=sorted(request.ends),
            stream=request.stream,
        )

    def planned(self, plan: StepPlan) -> None:
        """Writes a plan."""
        self._write(**plan._asdict())

    def answered(self, number: int, builder: AnswerBuilder) -> None:
        """Writes an answer that has ended."""
        self._write(got=number, tokens=builder.token_ids, logprobs=builder.logprobs)

    def _write(self, **line: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class Recording(NamedTuple):
    """Holds a log that has been read: requests and their results, by the answers' numbers."""

    engine: dict[str, Any]
    requests: dict[int, Request]
    plans: list[StepPlan]
    got: dict[int, tuple[list[int], list[float]]]


def read(file: str | os.PathLike[str]) -> Recording:
    """Reads a log.

    Raises:
        ValueError: it is not one.
    """
    recorded = Recording({}, {}, [], {})
    # a last line without a line break was being written when the process ended
    for nth, text in enumerate(Path(file).read_text(encoding="utf-8").split("\n")[:-1]):
        try:
            _take(recorded, json.loads(text))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file}, line {nth + 1}: must be of a plan log: {error!r}") from None
    if not recorded.engine:
        raise ValueError(f"{file}: must begin with what there is to know of the engine")
    return recorded


def _take(recorded: Recording, line: dict[str, Any]) -> None:
    if "engine" in line:
        recorded.engine.update(line["engine"])
    elif "answer" in line:
        sampling = SamplingParams(**line["sampling"])
        recorded.requests[line["answer"]] = Request(
            np.asarray(line["ids"], np.int32), sampling, frozenset(line["ends"]), line["stream"]
        )
    elif "got" in line:
        recorded.got[line["got"]] = line["tokens"], line["logprobs"]
    else:
        reading, decoding = line["reading"], line["decoding"]
        if reading is not None:
            reading = Reading(*reading)
            reading = reading._replace(chunks=[Chunk(*chunk) for chunk in reading.chunks])
        if decoding is not None:
            decoding = Decoding(*decoding)
            decoding = decoding._replace(
                rows=[Decode(*row) for row in decoding.rows],
                families=[Family(*family) for family in decoding.families],
            )
        moves = {
            name: [Move(*move) for move in line.get(name, ())] for name in ("resumed", "parked")
        }
        forgotten = line.get("forgotten", ())
        recorded.plans.append(StepPlan(reading, decoding, **moves, forgotten=forgotten))
