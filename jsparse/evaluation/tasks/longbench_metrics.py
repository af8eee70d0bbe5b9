"""Scores a text against one right answer with LongBench's metrics, from 0 to 1.

Each takes the classes to choose from. The metrics follow metrics.py of github.com/THUDM/LongBench
and the packages that it calls (rouge, fuzzywuzzy without Levenshtein).
"""

import difflib
import itertools
import re
import string
from collections import Counter
from collections.abc import Sequence


def _words(text: str) -> list[str]:
    """Returns the lower-case words without punctuation and articles."""
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def qa_f1(text: str, answer: str, classes: Sequence[str]) -> float:
    """Returns the F1 of the common words."""
    prediction, right = Counter(_words(text)), Counter(_words(answer))
    shared = (prediction & right).total()
    return 2 * shared / (prediction.total() + right.total()) if shared else 0.0


def _lcs(x: list[str], y: list[str]) -> set[str]:
    """Returns the words of a longest common subsequence.

    Of several, it is the one that leaves the end of y first.
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
    """Returns the F1 of ROUGE-L as the package rouge computes it.

    It takes unions of common words over pairs of sentences, and counts each word once.
    """
    prediction, right = (
        [" ".join(part.split()).split(" ") for part in whole.split(".") if part]
        for whole in (text, answer)
    )
    if not prediction or not right:
        return 0.0
    shared = len(set[str]().union(*(_lcs(x, y) for x, y in itertools.product(right, prediction))))
    recall, precision = (
        shared / len({*itertools.chain(*right)}),
        shared / len({*itertools.chain(*prediction)}),
    )
    return 2 * precision * recall / (precision + recall + 1e-8)


def classification(text: str, answer: str, classes: Sequence[str]) -> float:
    """Returns 1 / the number of classes named in the text, if the right one is among them, else 0.

    A class with a name that is part of the right one's does not count. LongBench removes these from
    a list while iterating over it, and therefore keeps some if several are adjacent.
    """
    named = [name for name in classes if name in text and (name == answer or name not in answer)]
    return 1 / len(named) if answer in named else 0.0


def count(text: str, answer: str, classes: Sequence[str]) -> float:
    """Returns the fraction of the numbers in the text that are the right one."""
    numbers = re.findall(r"\d+", text)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(text: str, answer: str, classes: Sequence[str]) -> float:
    """Scores like `count`, for right answers such as "Paragraph 7" or "段落7"."""
    number = re.search(r"\d+", answer)
    return count(text, number[0], classes) if number else 0.0


def code_similarity(text: str, answer: str, classes: Sequence[str]) -> float:
    """Returns the similarity of the right line and the first line of code in the text.

    It is rounded to whole per cent.
    """
    lines = text.lstrip("\n").split("\n")
    line = next((line for line in lines if not re.search("`|#|//", line)), "")
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100


def choice(text: str, answer: str, classes: Sequence[str]) -> float:
    """Returns 1 if the letter in "The correct answer is (A)" is the right one, for LongBench v2.

    The brackets may be missing.
    """
    plain = text.replace("*", "")
    match = re.search(r"The correct answer is \(([A-D])\)", plain) or re.search(
        r"The correct answer is ([A-D])", plain
    )
    return float(match is not None and match[1] == answer)
