"""Hides a pass key in repeated filler, and a needle at given depths.

Passkey: "Landmark Attention: Random-Access Infinite Context Length for Transformers" (Mohtashami
and Jaggi), arXiv:2305.16300. There are three differences: the key has five digits and occurs once
in the text (theirs is from 1 to 50000 and occurs twice); its place is uniform over the gaps between
fillers; and the end of the question is the answer's prefix.
"""

import random
from collections.abc import Callable
from pathlib import Path

from jsparse.evaluation.tasks.niah import DRAW, NEEDLE, NOISE, ask, word_list
from jsparse.evaluation.tasks.sample import EncodeFn, Sample, Task, filled

INTRODUCTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
GRID_DEPTHS = tuple(i / 10 for i in range(11))


def _hide(item: str, depth: float, size: int, joint: str) -> str:
    fillers = [NOISE] * size
    fillers.insert(round(depth * size), item)
    return joint.join(fillers)


def passkey(name: str, files: Path | None) -> Task:
    """Builds the task of a number of five digits, with the question at the end."""

    def make(encode: EncodeFn, rng: random.Random, length: int, index: int, size: int) -> Sample:
        key, depth = str(rng.randint(10000, 99999)), round(rng.random(), 3)
        text = _hide(f"The pass key is {key}. Remember it.", depth, size, " ")
        prompt = f"{INTRODUCTION}\n{text}\nWhat is the pass key?"
        return Sample(prompt, " The pass key is", (key,), 16, {"depth": depth})

    return filled(name, make, min_size=1)


def niah_grid(name: str, files: Path | None) -> Task:
    """Builds RULER's niah_single_1 at GRID_DEPTHS: shares of the fillers before the needle."""
    word_list("noun")

    def make(encode: EncodeFn, rng: random.Random, length: int, index: int, size: int) -> Sample:
        key, value = DRAW["words"](rng), DRAW["numbers"](rng)
        depth = GRID_DEPTHS[index % len(GRID_DEPTHS)]
        context = _hide(
            NEEDLE.format(type_needle_v="numbers", key=key, value=value), depth, size, "\n"
        )
        return ask("numbers", {key: [value]}, [key], context)._replace(meta={"depth": depth})

    return filled(name, make, min_size=1)


TASKS: dict[str, Callable[[str, Path | None], Task]] = {"passkey": passkey, "niah_grid": niah_grid}
