"""Tests LongBench: prompts and metrics against the original, cut prompts, and sources of rows."""

import hashlib
import json
import zipfile

import pytest

from jsparse.evaluation.tasks import longbench, parse
from jsparse.evaluation.tasks import longbench_metrics as metrics
from tests.support.encoders import smollm2, spent, words

pytestmark = pytest.mark.pure

# sha256 of the prompts in LongBench's config/dataset2prompt.json
PROMPTS = {
    "narrativeqa": "aada7ed24b06abac",
    "qasper": "0fbdd123fe7f83d6",
    "multifieldqa_en": "20b4666a2de8a1f7",
    "hotpotqa": "9ec4ae308865bd0c",
    "gov_report": "91c25d585b189ced",
    "qmsum": "dca23b678fe0183b",
    "multi_news": "2af3f28c40b902e6",
    "trec": "0eff8bebdba99d91",
    "triviaqa": "00a802e6377e72fc",
    "samsum": "a68d884234907eef",
    "lsht": "f3edabdf7fae53d6",
    "passage_count": "986550b6c61009c6",
    "passage_retrieval_en": "39b96b7fa52bdd2a",
    "passage_retrieval_zh": "c1e2346e245eb365",
    "lcc": "6a1f24cf0bb83cd9",
    "repobench-p": "ee9ec182ea5ffeb7",
    "2wikimqa": "9ec4ae308865bd0c",
    "musique": "9ec4ae308865bd0c",
}
V2_ROW = {
    "_id": "v2", "question": " Which? ", "choice_A": "a1", "choice_B": "b1 ", "choice_C": "c1",
    "choice_D": "d1", "answer": "B", "context": "\nA long story. " * 40, "length": "short",
}  # fmt: skip


def row(**fields):
    base = {
        "_id": "x",
        "context": "Once upon a time. " * 20,
        "input": "Who?",
        "answers": ["A fox"],
        "length": 80,
    }
    return {**base, "dataset": "", "language": "en", "all_classes": None, **fields}


def task(folder, dataset, *rows):
    text = "".join(f"{json.dumps(one, ensure_ascii=False)}\n" for one in rows)
    (folder / f"{dataset}.jsonl").write_text(text, encoding="utf-8")
    return parse(f"longbench_{dataset}", folder)[0]


def test_prompts_equal_those_of_longbench():
    for name, dataset in longbench.DATASETS.items():
        assert hashlib.sha256(dataset.prompt.encode()).hexdigest()[:16] == PROMPTS[name]


def test_row_becomes_a_sample(tmp_path):
    second = row(_id="y", input="Where {here}\u2028?", answers=["den", "fox den"])
    hotpot = task(tmp_path, "hotpotqa", row(), second)
    assert hotpot.num_samples == 2
    sample = hotpot.sample(words, 4096, 1)
    assert sample.prompt.endswith("\n\nQuestion: Where {here}\u2028?\nAnswer:")
    assert (sample.prefix, sample.answers, sample.max_new_tokens) == ("", ("den", "fox den"), 32)
    assert sample.meta == {"id": "y", "cut": False, "chat_template": True, "classes": [],
                           "context_tokens": len(words(sample.prompt))}  # fmt: skip
    assert hotpot.score("the den", sample) == 1
    assert hotpot.score("The fox's home", sample) == 0
    with pytest.raises(ValueError, match="index=2: must .* longbench_hotpotqa has 2 samples"):
        hotpot.sample(words, 4096, 2)


def test_long_prompts_are_cut_in_the_middle(tmp_path):
    encode, length = smollm2, 160
    context = " ".join(f"word{i}" for i in range(2000))
    asked = {"context": context, "input": "Question: Who?\nType:"}
    made = task(tmp_path, "trec", row(**asked, all_classes=["Person", "Place"]))
    sample = made.sample(encode, length, 0)
    assert sample.meta["cut"] and not sample.meta["chat_template"]
    assert 0.9 * length < spent(encode, sample) <= length
    whole = longbench.DATASETS["trec"].prompt.format(**asked)
    half = len(sample.prompt) // 2
    assert whole.startswith(sample.prompt[: len(sample.prompt) - half])
    assert whole.endswith(sample.prompt[-half:])
    with pytest.raises(ValueError, match="length=127: must be at least 128 for longbench_trec"):
        made.sample(encode, 127, 0)


def test_only_the_first_line_scores_in_few_shot_tasks(tmp_path):
    trec = task(tmp_path, "trec", row(answers=["Place"], all_classes=["Person", "Place", "Number"]))
    sample = trec.sample(words, 1024, 0)
    assert trec.score("\n\nPlace\nQuestion: how many?\nType: Number", sample) == 1
    assert trec.score("Place or Person", sample) == 0.5
    assert trec.score("Number\nPlace", sample) == 0


def test_v2_asks_for_a_letter(tmp_path):
    (tmp_path / "data.json").write_text(json.dumps([V2_ROW]))
    (v2,) = parse("longbench_v2", tmp_path)
    sample = v2.sample(words, 4096, 0)
    asked = "What is the correct answer to this question: Which?\nChoices:"
    assert "answer the question below.\n\n<text>\nA long" in sample.prompt
    assert f"story.\n</text>\n\n{asked}\n(A) a1\n(B) b1\n(C) c1\n(D) d1\n\nFormat" in sample.prompt
    assert (sample.answers, sample.max_new_tokens) == (("B",), 128)
    assert v2.score("**The correct answer is (B)**", sample) == 1
    assert v2.score("The correct answer is B.", sample) == 1
    assert v2.score("The correct answer is (C), not (B)", sample) == 0
    assert v2.score("B", sample) == 0


def test_rows_come_from_the_hub_without_a_folder(tmp_path, monkeypatch):
    asked = []
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/qasper.jsonl", json.dumps(row(input="Is it from the Hub?")))
    (tmp_path / "data.json").write_text(json.dumps([V2_ROW]))

    def download(repo_id, name, repo_type):
        asked.append((repo_id, name, repo_type))
        return str(tmp_path / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    qasper, v2 = parse("longbench_qasper,longbench_v2")
    assert "Is it from the Hub?" in qasper.sample(words, 4096, 0).prompt
    assert v2.num_samples == 1
    assert asked == [
        ("THUDM/LongBench", "data.zip", "dataset"),
        ("THUDM/LongBench-v2", "data.json", "dataset"),
    ]


def test_missing_files_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=f"files='{tmp_path}': longbench_lcc needs lcc.jsonl"):
        parse("longbench_lcc", tmp_path)
    with pytest.raises(ValueError, match=f"files='{tmp_path}': longbench_v2 needs data.json"):
        parse("longbench_v2", tmp_path)

    def fail(*args, **kwargs):
        raise OSError("no network\nat all")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    with pytest.raises(
        ValueError,
        match=r"data.zip of THUDM/LongBench cannot be downloaded from the Hub \(no network\)",
    ):
        parse("longbench_lcc")


def test_metrics_match_hand_computed_scores():
    for metric, text, answer, score in [
        (metrics.qa_f1, "The cat, a  dog!", "an CAT", 2 / 3),
        (metrics.qa_f1, "cat cat", "cat", 2 / 3),
        (metrics.qa_f1, "bird", "cat", 0),
        (metrics.qa_f1, "", "cat", 0),
        (metrics.classification, "Person", "Person", 1),
        (metrics.classification, "Person or Group of person", "Person", 0.5),
        (metrics.classification, "It is Group of Person", "Group of Person", 1),
        (metrics.classification, "Group", "Person", 0),
        (metrics.count, "There are 3, no 4, no 3", "3", 2 / 3),
        (metrics.count, "33", "3", 0),
        (metrics.count, "three", "3", 0),
        (metrics.retrieval, "Paragraph 12", "Paragraph 12", 1),
        (metrics.retrieval, "paragraph 12 or 13", "段落12", 0.5),
        (metrics.retrieval, "none", "Paragraph 1", 0),
        (metrics.code_similarity, "\n# a comment\nreturn x\nmore", "return x", 1),
        (metrics.code_similarity, "`return x`", "return x", 0),
        (metrics.code_similarity, "abcd", "bcde", 0.75),
        (metrics.rouge_l, "the cat sat", "the cat sat", 1),
        (metrics.rouge_l, "the cat sat", "the dog sat", 2 / 3),
        (metrics.rouge_l, "sat cat the", "the cat sat", 1 / 3),
        (metrics.rouge_l, "c d. a b", "a b. c d", 1),
        (metrics.rouge_l, "a a a a", "a", 1),
        (metrics.rouge_l, "", "a", 0),
        (metrics.rouge_l, "...", "a", 0),
    ]:
        assert metric(
            text, answer, ["Person", "Group of Person", "Group of person"]
        ) == pytest.approx(score, abs=1e-6), metric
