"""Asks the question of a task in a second turn, after the context has been compressed without it.

An evicting policy keeps the tokens that the prompt's end attends to. If that end is the question,
it keeps the answer; if the question comes later, dropped tokens are lost. The samples are those of
the task itself, cut before the question, so that both can be compared one by one.
"""

from collections.abc import Callable
from pathlib import Path

from jsparse.evaluation.tasks import passkey, ruler
from jsparse.evaluation.tasks.sample import EncodeFn, Sample, Task

ASKED = {"passkey": passkey.TASKS["passkey"], "niah_single_1": ruler.TASKS["niah_single_1"]}
SUFFIX = "_turn2"


def second_turn(build: Callable[[str, Path | None], Task]) -> Callable[[str, Path | None], Task]:
    """Returns the builder of a task with its question in the prompt's last line; no template."""

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
