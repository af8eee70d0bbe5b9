"""LongBench's metrics, from 0 to 1: what a text scores against one right answer, given the classes
to choose from.

After metrics.py of github.com/THUDM/LongBench and the packages that it calls (rouge, fuzzywuzzy
without Levenshtein).
"""

import difflib
import itertools
import re
import string
from collections import Counter
from collections.abc import Sequence


def _words(text: str) -> list[str]:
    """Lower-case words without punctuation and articles."""
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def qa_f1(text: str, answer: str, classes: Sequence[str]) -> float:
    """The F1 of the words that both have."""
    said, right = Counter(_words(text)), Counter(_words(answer))
    shared = (said & right).total()
    return 2 * shared / (said.total() + right.total()) if shared else 0.0


def _lcs(x: list[str], y: list[str]) -> set[str]:
    """The words of a longest common subsequence; of several, the one that leaves the end of y
    first.
    """
    lengths = [[0] * (len(y) + 1) for _ in range(len(x) + 1)]
    for (i, a), (j, b) in itertools.product(enumerate(x, 1), enumerate(y, 1)):
        lengths[i][j] = (
            lengths[i - 1][j - 1] + 1 if a == b else max(lengths[i - 1][j], lengths[i][j - 1])
        )
    i, j, words = len(x), len(y), set()
    while i and j:
        if x[i - 1] == y[j - 1]:
            i, j = i - 1, j - 1
            words.add(x[i])
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words


def rouge_l(text: str, answer: str, classes: Sequence[str]) -> float:
    """The F1 of ROUGE-L as the package rouge counts it: unions of common words over pairs of
    sentences, each once.
    """
    said, right = (
        [" ".join(part.split()).split(" ") for part in whole.split(".") if part]
        for whole in (text, answer)
    )
    if not said or not right:
        return 0.0
    shared = len(set[str]().union(*(_lcs(x, y) for x, y in itertools.product(right, said))))
    recall, precision = (
        shared / len({*itertools.chain(*right)}),
        shared / len({*itertools.chain(*said)}),
    )
    return 2 * precision * recall / (precision + recall + 1e-8)


def classification(text: str, answer: str, classes: Sequence[str]) -> float:
    """1 / the number of classes that the text names, where the right one is among them.

    A class whose name is part of the right one's does not count. LongBench drops these from the
    list it walks over, and so keeps some where several follow one another.
    """
    named = [name for name in classes if name in text and (name == answer or name not in answer)]
    return 1 / len(named) if answer in named else 0.0


def count(text: str, answer: str, classes: Sequence[str]) -> float:
    """The share of the numbers in the text that are the right one."""
    numbers = re.findall(r"\d+", text)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(text: str, answer: str, classes: Sequence[str]) -> float:
    """As `count`, where the right answer reads "Paragraph 7" or "段落7"."""
    number = re.search(r"\d+", answer)
    return count(text, number[0], classes) if number else 0.0


def code_similarity(text: str, answer: str, classes: Sequence[str]) -> float:
    """How alike the right line and the first line of code in the text are, in whole per cent."""
    lines = text.lstrip("\n").split("\n")
    line = next((line for line in lines if not re.search("`|#|//", line)), "")
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100


def choice(text: str, answer: str, classes: Sequence[str]) -> float:
    """LongBench v2: 1 where the letter in "The correct answer is (A)" is the right one; the
    brackets may lack.
    """
    plain = text.replace("*", "")
    said = re.search(r"The correct answer is \(([A-D])\)", plain) or re.search(
        r"The correct answer is ([A-D])", plain
    )
    return float(said is not None and said[1] == answer)
