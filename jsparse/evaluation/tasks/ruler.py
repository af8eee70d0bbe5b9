"""Generates RULER's texts of any length: needles, chains of variables and frequent words.

Paper: "RULER: What's the Real Context Size of Your Long-Context Language Models?" (Hsieh et al.),
arXiv:2404.06654. Templates, counts and numbers of generated tokens are those of
github.com/NVIDIA/RULER; `jsparse.evaluation.tasks` lists the differences of the generators.
"""

import functools
import itertools
import math
import random
import string
from collections.abc import Callable
from pathlib import Path

from jsparse.evaluation.tasks.niah import NOISE, Niah, among_lines, distinct, word_list
from jsparse.evaluation.tasks.ruler_files import qa
from jsparse.evaluation.tasks.sample import EncodeFn, Sample, Task, filled, largest

VT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    "{context}\nQuestion: Find all variables that are assigned the value {query} in the text above."
)
VT_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {num_v} "
    "variables are assigned the value {query}, they are: "
)
CWE = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list?"
)
CWE_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
FWE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. {context}\nQuestion: Do not provide any explanation. Please "
    "ignore the dots '....'. What are the three most frequently appeared words in the above coded "
    "text?"
)
FWE_PREFIX = (
    " Answer: According to the coded text above, the three most frequently appeared words are:"
)

NUM_HOPS = 4
EXAMPLE_TOKENS = 500
NUM_COMMON = 10
ZETA_2 = math.pi**2 / 6


def _letters(rng: random.Random, alphabet: str, count: int) -> Callable[[], str]:
    return lambda: "".join(rng.choices(alphabet, k=count))


def _chain(rng: random.Random, name_len: int, size: int) -> tuple[str, str, list[str]]:
    """Returns prompt, prefix and variables of one chain of assignments in `size` lines of noise."""
    names = distinct(_letters(rng, string.ascii_uppercase, name_len))
    variables = list(itertools.islice(names, NUM_HOPS + 1))
    value = str(rng.randrange(10000, 99999))
    hops = [f"VAR {new} = VAR {old} " for old, new in itertools.pairwise(variables)]
    context = among_lines(rng, [NOISE] * size, [f"VAR {variables[0]} = {value}", *hops])
    return (
        VT.format(context=context, query=value),
        VT_PREFIX.format(num_v=NUM_HOPS + 1, query=value),
        variables,
    )


def vt(name: str, files: Path | None) -> Task:
    """Builds variable tracking: a chain of five variables, after an example of up to 500 tokens."""

    def make(encode: EncodeFn, rng: random.Random, length: int, index: int, size: int) -> Sample:
        seed = rng.random()

        def example(size: int) -> str:
            prompt, prefix, variables = _chain(random.Random(seed), 3, size)
            return f"{prompt}{prefix} {' '.join(variables)}\n\n"

        shown = example(
            largest(lambda size: len(encode(example(size))), EXAMPLE_TOKENS, NUM_HOPS + 1)
        )
        prompt, prefix, variables = _chain(rng, 5, size)
        return Sample(shown + prompt, prefix, tuple(variables), 30, {})

    return filled(name, make, min_size=NUM_HOPS + 1)


@functools.cache
def all_words() -> tuple[str, ...]:
    """Returns every word of wonderwords once."""
    return tuple(sorted({*word_list("noun"), *word_list("adjective"), *word_list("verb")}))


def _numbered(words: list[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def _common(
    rng: random.Random, num_words: int, common: int, uncommon: int
) -> tuple[str, list[str]]:
    """Returns a prompt with `num_words` words, and the ten common ones, each `common` times."""
    words = rng.sample(all_words(), len(all_words()))[:num_words]
    listed = words[:NUM_COMMON] * common + words[NUM_COMMON:] * uncommon
    rng.shuffle(listed)
    return CWE.format(context=_numbered(listed)), words[:NUM_COMMON]


def cwe(name: str, files: Path | None) -> Task:
    """Builds common words extraction: ten words 30 times among words 3 times.

    In budgets below 4096 tokens it is 6 times and once.
    """

    def make(encode: EncodeFn, rng: random.Random, length: int, index: int, size: int) -> Sample:
        example, counts = ((20, 3, 1), (6, 1)) if length < 4096 else ((40, 10, 3), (30, 3))
        shown, common = _common(rng, *example)
        prompt, answers = _common(rng, size, *counts)
        return Sample(
            f"{shown}{CWE_PREFIX} {_numbered(common)}\n{prompt}",
            CWE_PREFIX,
            tuple(answers),
            120,
            {},
        )

    return filled(name, make, min_size=NUM_COMMON + 1, max_size=len(all_words()))


def fwe(name: str, files: Path | None) -> Task:
    """Builds frequent words extraction: coded words with frequencies by Zipf's law (alpha 2).

    The most frequent are dots. A size is the number of words that the whole law would spread; from
    74 on, the third answer is more frequent than the word after it.
    """

    def make(encode: EncodeFn, rng: random.Random, length: int, index: int, size: int) -> Sample:
        num_words = max((length - 50) // 50, 6)
        words = [
            "...",
            *itertools.islice(distinct(_letters(rng, string.ascii_lowercase, 6)), num_words - 1),
        ]
        listed = [
            word for rank, word in enumerate(words, 1) for _ in range(int(size / rank**2 / ZETA_2))
        ]
        rng.shuffle(listed)
        return Sample(FWE.format(context=" ".join(listed)), FWE_PREFIX, tuple(words[1:4]), 50, {})

    return filled(name, make, min_size=74)


TASKS: dict[str, Callable[[str, Path | None], Task]] = {
    "niah_single_1": Niah("noise").task,
    "niah_single_2": Niah("essay").task,
    "niah_single_3": Niah("essay", value="uuids").task,
    "niah_multikey_1": Niah("essay", num_keys=4).task,
    "niah_multikey_2": Niah("needle").task,
    "niah_multikey_3": Niah("needle", key="uuids", value="uuids").task,
    "niah_multivalue": Niah("essay", num_values=4).task,
    "niah_multiquery": Niah("essay", num_queries=4).task,
    "vt": vt,
    "cwe": cwe,
    "fwe": fwe,
    "qa_1": qa,
    "qa_2": qa,
}
