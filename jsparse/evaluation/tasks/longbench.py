"""Reads LongBench and LongBench v2 from a local copy or the Hub.

Papers: "LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding" (Bai et al.),
arXiv:2308.14508, and "LongBench v2" (Bai et al.), arXiv:2412.15204. Prompts, numbers of generated
tokens and metrics are those of github.com/THUDM/LongBench. There are two differences. Prompts that
are too long are also cut in the middle, but by characters, so that both halves have the same number
of them (LongBench halves the tokens, which requires a decoder). v2 is answered greedily, without a
chain of thought. The Chinese tasks with metrics that need a word segmenter (multifieldqa_zh,
dureader, vcsum) are omitted.
"""

import json
import zipfile
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from jsparse.evaluation.tasks import longbench_metrics as metrics
from jsparse.evaluation.tasks.ruler_files import find_file
from jsparse.evaluation.tasks.sample import EncodeFn, Sample, Task, check_index, largest

MIN_PROMPT = 64  # tokens


class Dataset(NamedTuple):
    """How to ask and score the rows of one data set.

    Attributes:
        prompt: a text with the names of a row's fields in braces.
        metric: (text, answer, classes) -> a score from 0 to 1; the best over the answers counts.
        plain: whether the model continues the prompt, without a chat template.
        first_line: whether only the first line of the text counts.
    """

    prompt: str
    max_new_tokens: int
    metric: Callable[[str, str, Sequence[str]], float]
    plain: bool = False
    first_line: bool = False


def _dataset(metric: str, **fields: Any) -> Dataset:
    return Dataset(metric=getattr(metrics, metric), **fields)


_FILE = resources.files("jsparse.evaluation.tasks") / "longbench.json"
DATASETS = {
    name: _dataset(**fields) for name, fields in json.loads(_FILE.read_text("utf-8")).items()
}
V2 = DATASETS.pop("v2")


def _download(repo_id: str, name: str) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(repo_id, name, repo_type="dataset"))
    except Exception as error:  # the HTTP client's errors are not part of the library's interface
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
    """Builds the task of a data set of LongBench, from the folder's NAME.jsonl or from the Hub."""
    dataset = name.removeprefix("longbench_")
    return _task(
        name,
        DATASETS[dataset],
        [json.loads(line) for line in _read(dataset, files).split("\n") if line],
    )


def longbench_v2(name: str, files: Path | None) -> Task:
    """Builds the task of LongBench v2, from the folder's data.json or from the Hub."""
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
