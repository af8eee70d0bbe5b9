"""Reads LongBench and LongBench v2 from a local copy or the Hub.

Papers: "LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding" (Bai et al.),
arXiv:2308.14508, and "LongBench v2" (Bai et al.), arXiv:2412.15204. Prompts, numbers of generated
tokens and metrics are those of github.com/THUDM/LongBench. Where we differ: prompts that are too
long are cut in the middle as there, but by characters, so that both halves have the same number of
them (LongBench halves the tokens, and needs a decoder for that); v2 is answered greedily, without a
chain of thought. Left out: the Chinese tasks whose metric needs a word segmenter (multifieldqa_zh,
dureader, vcsum).
"""

import json
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jsparse.evaluation.tasks import longbench_metrics as metrics
from jsparse.evaluation.tasks.ruler_files import find_file
from jsparse.evaluation.tasks.sample import EncodeFn, Sample, Task, check_index, largest

MIN_PROMPT = 64  # tokens


class Dataset(NamedTuple):
    """Describes how the rows of one data set are asked and scored.

    Attributes:
        prompt: a text with the names of a row's fields in braces.
        max_new_tokens: the most tokens that may be generated.
        metric: (text, answer, classes) -> a score from 0 to 1; the best over the answers counts.
        plain: whether the prompt is to be continued, without a chat template.
        first_line: whether the first line of the text alone counts.
    """

    prompt: str
    max_new_tokens: int
    metric: Callable[[str, str, Sequence[str]], float]
    plain: bool = False
    first_line: bool = False


# the published numbers were measured with "asconcisely"
_PHRASE = (
    "asconcisely as you can, using a single phrase if possible. Do not provide any explanation.\n\n"
)
_ARTICLE = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question "
    "cannot be answered based "
    'on the information in the article, write "unanswerable". If the question is a yes/no '
    'question, answer "yes", '
    '"no", or "unanswerable". Do not provide any explanation.\n\n'
)
_ONLY = (
    "Answer the question based on the given passages. Only give me the answer and do not output "
    "any other words.\n\n"
)
_PASSAGES = (
    f"{_ONLY}The following are given passages.\n{{context}}\n\n{_ONLY}Question: {{input}}\nAnswer:"
)
DATASETS = {
    "narrativeqa": Dataset(
        "You are given a story, which can be either a novel or a movie script, and a question. "
        "Answer the question "
        f"{_PHRASE}Story: {{context}}\n\nNow, answer the question based on the story {_PHRASE}"
        "Question: {input}\n\nAnswer:",
        128,
        metrics.qa_f1,
    ),
    "qasper": Dataset(
        "You are given a scientific article and a question. Answer the question "
        f"{_ARTICLE}Article: {{context}}\n\n"
        f" Answer the question based on the above article {_ARTICLE}Question: {{input}}\n\nAnswer:",
        128,
        metrics.qa_f1,
    ),
    "multifieldqa_en": Dataset(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following "
        "question based on the "
        "above text, only give me the answer and do not output any other words.\n\nQuestion: "
        "{input}\nAnswer:",
        64,
        metrics.qa_f1,
    ),
    "hotpotqa": Dataset(_PASSAGES, 32, metrics.qa_f1),
    "2wikimqa": Dataset(_PASSAGES, 32, metrics.qa_f1),
    "musique": Dataset(_PASSAGES, 32, metrics.qa_f1),
    "gov_report": Dataset(
        "You are given a report by a government agency. Write a one-page summary of the "
        "report.\n\nReport:\n{context}"
        "\n\nNow, write a one-page summary of the report.\n\nSummary:",
        512,
        metrics.rouge_l,
    ),
    "qmsum": Dataset(
        "You are given a meeting transcript and a query containing a question or instruction. "
        "Answer the query in one "
        "or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the above "
        "meeting transcript "
        "in one or more sentences.\n\nQuery: {input}\nAnswer:",
        512,
        metrics.rouge_l,
    ),
    "multi_news": Dataset(
        "You are given several news passages. Write a one-page summary of all news. "
        "\n\nNews:\n{context}\n\nNow, write "
        "a one-page summary of all the news.\n\nSummary:",
        512,
        metrics.rouge_l,
    ),
    "trec": Dataset(
        "Please determine the type of the question below. Here are some examples of "
        "questions.\n\n{context}\n{input}",
        64,
        metrics.classification,
        plain=True,
        first_line=True,
    ),
    "triviaqa": Dataset(
        "Answer the question based on the given passage. Only give me the answer and do not output "
        "any other words. "
        "The following are some examples.\n\n{context}\n\n{input}",
        32,
        metrics.qa_f1,
        plain=True,
        first_line=True,
    ),
    "samsum": Dataset(
        "Summarize the dialogue into a few short sentences. The following are some "
        "examples.\n\n{context}\n\n{input}",
        128,
        metrics.rouge_l,
        plain=True,
        first_line=True,
    ),
    "lsht": Dataset(
        "请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}",
        64,
        metrics.classification,
        plain=True,
        first_line=True,
    ),
    "passage_count": Dataset(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. "
        "Please carefully read "
        "these paragraphs and determine how many unique paragraphs there are after removing "
        "duplicates. In other "
        "words, how many non-repeating paragraphs are there in total?\n\n{context}\n\nPlease enter "
        "the final count of "
        "unique paragraphs after removing duplicates. The output format should only contain the "
        "number, such as 1, 2, "
        "3, and so on.\n\nThe final answer is: ",
        32,
        metrics.count,
    ),
    "passage_retrieval_en": Dataset(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which "
        "paragraph the abstract "
        "is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the "
        "number of the paragraph "
        'that the abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", '
        "etc.\n\n"
        "The answer is: ",
        32,
        metrics.retrieval,
    ),
    "passage_retrieval_zh": Dataset(
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n下面是一个摘要\n\n"
        '{input}\n\n请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n答案是：',
        32,
        metrics.retrieval,
    ),
    "lcc": Dataset(
        "Please complete the code given below. \n{context}Next line of code:\n",
        64,
        metrics.code_similarity,
        plain=True,
    ),
    "repobench-p": Dataset(
        "Please complete the code given below. \n{context}{input}Next line of code:\n",
        64,
        metrics.code_similarity,
        plain=True,
    ),
}
V2 = Dataset(
    "Please read the following text and answer the question "
    "below.\n\n<text>\n{context}\n</text>\n\n"
    "What is the correct answer to this question: {question}\nChoices:\n(A) {choice_A}\n(B) "
    "{choice_B}\n"
    "(C) {choice_C}\n(D) {choice_D}\n\n"
    'Format your response as follows: "The correct answer is (insert answer here)".',
    128,
    metrics.choice,
)


def _download(repo_id: str, name: str) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(repo_id, name, repo_type="dataset"))
    except Exception as error:  # the HTTP client's errors are no part of the library's interface
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"files=None: {name} of {repo_id} cannot be downloaded from the Hub ({reason}), give "
            "the folder that holds it"
        ) from error


def _read(dataset: str, files: Path | None) -> str:
    if files is not None:
        name = f"{dataset}.jsonl"
        return find_file(
            f"longbench_{dataset}", name, files, "of THUDM/LongBench's data.zip"
        ).read_text("utf-8")
    with zipfile.ZipFile(_download("THUDM/LongBench", "data.zip")) as archive:
        return archive.read(f"data/{dataset}.jsonl").decode()


def longbench(name: str, files: Path | None) -> Task:
    """Builds the task of a data set of LongBench.

    Its rows are NAME.jsonl of the folder, or of the Hub id THUDM/LongBench if `files` is None.
    """
    dataset = name.removeprefix("longbench_")
    return _task(
        name,
        DATASETS[dataset],
        [json.loads(line) for line in _read(dataset, files).split("\n") if line],
    )


def longbench_v2(name: str, files: Path | None) -> Task:
    """Builds the task of LongBench v2.

    Its rows are data.json of the folder, or of the Hub id THUDM/LongBench-v2 if `files` is None.
    """
    repo_id = "THUDM/LongBench-v2"
    file = (
        _download(repo_id, "data.json")
        if files is None
        else find_file(name, "data.json", files, f"of {repo_id}")
    )
    rows = [
        {key: str(value).strip() for key, value in row.items()}
        for row in json.loads(file.read_text("utf-8"))
    ]
    return _task(name, V2, [{**row, "answers": [row["answer"]]} for row in rows])


def _task(name: str, dataset: Dataset, rows: list[dict[str, Any]]) -> Task:
    def sample(encode: EncodeFn, length: int, index: int) -> Sample:
        check_index(name, index, len(rows))
        budget = length - dataset.max_new_tokens
        if budget < MIN_PROMPT:
            raise ValueError(
                f"length={length}: must be at least {dataset.max_new_tokens + MIN_PROMPT} for "
                f"{name}"
            )
        row = rows[index]
        text = dataset.prompt.format(**row)

        def cut(chars: int) -> str:
            return text[: chars - chars // 2] + text[len(text) - chars // 2 :]

        kept = largest(lambda chars: len(encode(cut(chars))), budget, 0, len(text))
        meta = {
            "id": row["_id"],
            "cut": kept < len(text),
            "chat_template": not dataset.plain,
            "classes": row.get("all_classes") or [],
            "context_tokens": len(encode(cut(kept))),
        }
        return Sample(cut(kept), "", tuple(row["answers"]), dataset.max_new_tokens, meta)

    def score(text: str, sample: Sample) -> float:
        prediction = text.lstrip("\n").partition("\n")[0] if dataset.first_line else text
        return max(
            dataset.metric(prediction, answer, sample.meta["classes"]) for answer in sample.answers
        )

    return Task(name, sample, score, len(rows))


TASKS: dict[str, Callable[[str, Path | None], Task]] = {
    **{f"longbench_{name}": longbench for name in DATASETS},
    "longbench_v2": longbench_v2,
}
