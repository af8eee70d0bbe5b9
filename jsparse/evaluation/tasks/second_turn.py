"""Asks the question of a task in a second turn, when the context has been compressed without it.

A policy that evicts keeps the tokens that the prompt's end attends to. Where that is the question,
it keeps the answer; where the question comes later, dropped tokens are gone. The samples are those
of the task itself, cut before the question, so that both can be compared one by one.
"""

from collections.abc import Callable
from pathlib import Path

from jsparse.evaluation.tasks import passkey, ruler
from jsparse.evaluation.tasks.sample import EncodeFn, Sample, Task

ASKED = {"passkey": passkey.TASKS["passkey"], "niah_single_1": ruler.TASKS["niah_single_1"]}
SUFFIX = "_turn2"


def second_turn(build: Callable[[str, Path | None], Task]) -> Callable[[str, Path | None], Task]:
    """Returns the builder of a task whose prompts' last line is the question; no chat template."""

    def built(name: str, files: Path | None) -> Task:
        task = build(name.removesuffix(SUFFIX), files)

        def sample(encode: EncodeFn, length: int, index: int) -> Sample:
            one = task.sample(encode, length, index)
            context, newline, question = one.prompt.rpartition("\n")
            meta = one.meta | {"chat_template": False}
            return one._replace(prompt=context + newline, question=question, meta=meta)

        return Task(name, sample, task.score, task.num_samples)

    return built


TASKS = {f"{name}{SUFFIX}": second_turn(build) for name, build in ASKED.items()}
