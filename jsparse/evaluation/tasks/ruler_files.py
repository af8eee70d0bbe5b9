"""Reads the files of RULER's tasks: Paul Graham's essays for haystacks, SQuAD and HotpotQA.

The latter two have the questions. The files are those that RULER's scripts/data/synthetic/json/
downloads, under the same names.
"""

import functools
import itertools
import json
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from jsparse.evaluation.tasks.sample import EncodeFn, Sample, Task, filled, score_any

DEPTHS = [round(100 * i / 39) for i in range(40)]  # percent
_ONLY = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words."
)
QA = (
    f"{_ONLY}\n\nThe following are given documents.\n\n{{context}}\n\n{_ONLY}\n\n"
    "Question: {query}"
)
QA_PREFIX = " Answer:"


def find_file(task: str, name: str, files: Path | None, source: str) -> Path:
    """Returns the path of a file of the folder; ValueError names the task and the file's source."""
    if files is None:
        raise ValueError(f"files=None: {task} needs {name} ({source}), give its folder")
    if not (files / name).is_file():
        raise ValueError(
            f"files={str(files)!r}: {task} needs {name} ({source}), which is not there"
        )
    return files / name


@functools.cache
def read_json(file: Path) -> Any:
    """Returns the content of a JSON file."""
    try:
        return json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(file)!r} is not JSON: {error}") from None


def essay_words(task: str, files: Path | None) -> list[str]:
    """Returns the words of Paul Graham's essays."""
    file = find_file(
        task, "PaulGrahamEssays.json", files, "RULER's download_paulgraham_essay.py writes it"
    )
    return read_json(file)["text"].split()


def among_sentences(rng: random.Random, words: Iterable[str], items: list[str]) -> str:
    """Puts the items between sentences at some of the DEPTHS, in the order of the items."""
    sentences = re.split(r"(?<=[.!?]) ", " ".join(words))
    depths = sorted(rng.sample(DEPTHS, len(items)))
    cuts = [0, *(len(sentences) * depth // 100 for depth in depths), len(sentences)]
    pieces = (" ".join(sentences[start:stop]) for start, stop in itertools.pairwise(cuts))
    ordered = itertools.chain.from_iterable(itertools.zip_longest(pieces, items, fillvalue=""))
    return " ".join(piece for piece in ordered if piece)


class DocumentQuestion(NamedTuple):
    """A question with the indices of its documents.

    `gold` documents are always shown, `near` ones before any others.
    """

    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    near: tuple[int, ...]


def squad(data: Any) -> tuple[list[str], list[DocumentQuestion]]:
    """Returns documents and answerable questions of SQuAD 2.0; an article's paragraphs are near."""
    articles = [article["paragraphs"] for article in data["data"]]
    documents = sorted(
        {paragraph["context"] for paragraphs in articles for paragraph in paragraphs}
    )
    numbers = {document: i for i, document in enumerate(documents)}
    questions = []
    for paragraphs in articles:
        candidates = dict.fromkeys(numbers[paragraph["context"]] for paragraph in paragraphs)
        for paragraph in paragraphs:
            gold = numbers[paragraph["context"]]
            near = tuple(i for i in candidates if i != gold)
            for entry in paragraph["qas"]:
                if not entry["is_impossible"]:
                    answers = tuple(dict.fromkeys(answer["text"] for answer in entry["answers"]))
                    questions.append(DocumentQuestion(entry["question"], answers, (gold,), near))
    return documents, questions


def hotpotqa(data: Any) -> tuple[list[str], list[DocumentQuestion]]:
    """Returns documents and questions of HotpotQA; all paragraphs are gold."""
    texts = [
        tuple(f"{title}\n{''.join(lines)}" for title, lines in entry["context"]) for entry in data
    ]
    documents = sorted(set(itertools.chain.from_iterable(texts)))
    numbers = {document: i for i, document in enumerate(documents)}
    questions = [
        DocumentQuestion(
            entry["question"],
            (entry["answer"],),
            tuple(numbers[text] for text in dict.fromkeys(own)),
            (),
        )
        for entry, own in zip(data, texts, strict=True)
    ]
    return documents, questions


QA_FILES = {
    "qa_1": ("squad.json", squad, "SQuAD's dev-v2.0.json"),
    "qa_2": ("hotpotqa.json", hotpotqa, "HotpotQA's hotpot_dev_distractor_v1.json"),
}


def qa(name: str, files: Path | None) -> Task:
    """Builds questions about documents that are mixed with others."""
    file, read, source = QA_FILES[name]
    documents, questions = read(read_json(find_file(name, file, files, source)))

    def make(encode: EncodeFn, rng: random.Random, length: int, index: int, size: int) -> Sample:
        question = questions[index]
        shown = {*question.gold, *question.near}
        near = rng.sample(question.near, len(question.near))
        far = (i for i in rng.sample(range(len(documents)), len(documents)) if i not in shown)
        chosen = [
            *question.gold,
            *itertools.islice(itertools.cycle([*near, *far, *question.gold]), size),
        ]
        rng.shuffle(chosen)
        context = "\n\n".join(
            f"Document {i}:\n{documents[number]}" for i, number in enumerate(chosen, 1)
        )
        prompt = QA.format(context=context, query=question.text)
        return Sample(prompt, QA_PREFIX, question.answers, 32, {"documents": len(chosen)})

    return filled(name, make, min_size=0, score=score_any, num_samples=len(questions))
