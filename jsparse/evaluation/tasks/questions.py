r"""Asks the questions of a JSONL file, which may need long answers, like those of AIME.

questions.jsonl has one object per line: `question`, `answer` (text or a number) and optionally
`id`; other keys are ignored. A question is asked verbatim, so it must include instructions on the
form of the answer (such as `\boxed{...}`). An answer is right only if it equals the one in the
file: numbers as numbers, anything else as text without blanks and $.
"""

import json
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from jsparse.evaluation.tasks.ruler_files import find_file
from jsparse.evaluation.tasks.sample import EncodeFn, Sample, Task, check_index

FILE = "questions.jsonl"
MAX_NEW_TOKENS = 8192
NUMBER = re.compile(r"(?:(?<!\w)[-+\u2212])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?", re.ASCII)
BOX = re.compile(r"\\boxed\s*\{")


class Question(NamedTuple):
    """A line of the file; the default `id` is the line's number."""

    question: str
    answer: str
    id: str


def final_answer(text: str) -> str | None:
    r"""Returns the content of the last complete \boxed{...}, else the last number, else None."""
    for box in reversed(list(BOX.finditer(text))):
        depth = 1
        for brace in re.finditer(r"[{}]", text[box.end() :]):
            depth += 1 if brace[0] == "{" else -1
            if not depth:
                return text[box.end() : box.end() + brace.start()]
    numbers = NUMBER.findall(text)
    return numbers[-1] if numbers else None


def same(prediction: str, answer: str) -> bool:
    """Returns whether two answers are equal: as numbers if both are, else as text."""
    return _normal(prediction) == _normal(answer)


def read(file: Path) -> list[Question]:
    """Returns the questions of a file; blank lines are skipped.

    Raises:
        ValueError: the file or a line is malformed; the message names the file, the line and the
            rule.
    """
    try:
        text = file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(file)!r} is not UTF-8: {error}") from None
    # str.splitlines would also split at U+2028, which JSON may contain
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{str(file)!r} is empty: must hold at least one question")
    return [_question(f"{str(file)!r}, line {number}", number, line) for number, line in lines]


def questions(name: str, files: Path | None, max_new_tokens: int = MAX_NEW_TOKENS) -> Task:
    """Builds the task of the questions in questions.jsonl."""
    entries = read(find_file(name, FILE, files, "a question and its answer per line"))

    def sample(encode: EncodeFn, length: int, index: int) -> Sample:
        check_index(name, index, len(entries))
        question, answer, identity = entries[index]
        meta = {"id": identity, "context_tokens": len(encode(question))}
        return Sample(question, "", (answer,), max_new_tokens, meta)

    def score(text: str, sample: Sample) -> float:
        prediction = final_answer(text)
        return float(prediction is not None and same(prediction, sample.answers[0]))

    return Task(name, sample, score, len(entries), open_ended=True)


def _question(where: str, number: int, line: str) -> Question:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where} is {line.strip()[:40]!r}: must be an object")
    question, answer, identity = row.get("question"), row.get("answer"), row.get("id", number)
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{where}: question={question!r}: must be text that is not blank")
    if not _is_value(answer) or not _plain(str(answer)):
        raise ValueError(f"{where}: answer={answer!r}: must be a number, or text that is not blank")
    if not _is_value(identity):
        raise ValueError(f"{where}: id={identity!r}: must be text or a number")
    return Question(question, str(answer), str(identity))


def _is_value(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _plain(text: str) -> str:
    """Returns the text without blanks and $, with hyphens for typographic minus signs."""
    return re.sub(r"[\s$]", "", text).replace("\N{MINUS SIGN}", "-")


def _normal(text: str) -> str | Decimal:
    plain = _plain(text)
    return Decimal(plain.replace(",", "")) if NUMBER.fullmatch(plain) else plain


TASKS: dict[str, Callable[[str, Path | None, int], Task]] = {"questions": questions}
