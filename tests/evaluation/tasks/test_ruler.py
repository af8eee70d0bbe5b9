"""Tests RULER's generators against NVIDIA's: templates, counts, forms and positions."""

import hashlib
import json
import re
import sys
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jsparse.evaluation.tasks import niah, parse, ruler, ruler_files
from tests.support.encoders import smollm2, spent, words

pytestmark = pytest.mark.pure

# sha256 of template + answer prefix in NVIDIA/RULER's scripts/data/synthetic/constants.py
TEMPLATES = {
    "d285336585494ddc": (niah.TEMPLATE, niah.PREFIX),
    "2cb3a86e01be9650": (ruler.VT, ruler.VT_PREFIX),
    "c2426f94a28fc3a2": (ruler.CWE, ruler.CWE_PREFIX),
    "0bfad42dcc7b1cff": (ruler.FWE, ruler.FWE_PREFIX),
    "15017066bdc1a167": (ruler_files.QA, ruler_files.QA_PREFIX),
}
NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (.+?) is: (.+?)\.(?=[ \n])")
# budget; counts of common and other words; the same in the example, and its number of different
# words
CWE_COUNTS = [(4095, 6, 1, (3, 1, 20)), (4096, 30, 3, (10, 3, 40))]

# keys in the text, values of each, and expected answers
ESSAYS = {
    "niah_single_2": (1, 1, 1),
    "niah_single_3": (1, 1, 1),
    "niah_multikey_1": (4, 1, 1),
    "niah_multivalue": (1, 4, 4),
    "niah_multiquery": (4, 1, 4),
}


def samples(name, length=2048, count=10, files=None):
    return [parse(name, files)[0].sample(words, length, index) for index in range(count)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ruler")
    text = " ".join(
        f"Essay sentence {i} speaks of startups\n and   of {i * 7} painters!" for i in range(400)
    )
    (folder / "PaulGrahamEssays.json").write_text(json.dumps({"text": text}))

    def asked(question, *answers):
        said = [{"text": answer} for answer in answers]
        return {"question": question, "is_impossible": not answers, "answers": said}

    def paragraph(a, p):
        questions = [asked(f"What of {a}.{p}?", *["Yes"] * 3), asked(f"Nothing of {a}.{p}?")]
        return {"context": f"Article {a} paragraph {p}: " + "fact " * 30, "qas": questions}

    articles = [{"paragraphs": [paragraph(a, p) for p in range(4)]} for a in range(5)]
    (folder / "squad.json").write_text(json.dumps({"data": articles}))
    hotpot = [
        {
            "question": f"Who is {q}?",
            "answer": f"Person {q}",
            "context": [[f"Title {q}.{i}", ["First. ", f"Then {i}. " * 9]] for i in range(10)],
        }
        for q in range(6)
    ]
    (folder / "hotpotqa.json").write_text(json.dumps(hotpot))
    return folder


def test_templates_are_nvidias():
    for digest, texts in TEMPLATES.items():
        assert hashlib.sha256("".join(texts).encode()).hexdigest()[:16] == digest


def test_generated_tokens_are_nvidias(files):
    made = {name: samples(name, count=1, files=files)[0].max_new_tokens for name in ruler.TASKS}
    expected = {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
    assert made == {name: expected.get(name, 128) for name in ruler.TASKS}


def test_niah_single_1_hides_a_number_in_noise():
    for sample in samples("niah_single_1"):
        (value,) = sample.answers
        ((kind, key, said),) = NEEDLE.findall(sample.prompt)
        assert (kind, said) == ("numbers", value) and re.fullmatch(r"[1-9]\d{6}", value)
        assert sample.prompt.count(value) == 1
        assert sample.prompt.startswith(
            "A special magic number is hidden within the following text. Make sure to"
        )
        assert sample.prompt.endswith(
            f"\nWhat is the special magic number for {key} mentioned in the provided text?"
        )
        assert (
            sample.prefix
            == f" The special magic number for {key} mentioned in the provided text is"
        )
        lines = sample.prompt.split("\n")[1:-1]
        assert Counter(lines).most_common(1)[0] == (niah.NOISE, len(lines) - 1)


@pytest.mark.parametrize(
    ("name", "form"), [("niah_multikey_2", r"\d{7}"), ("niah_multikey_3", r"[0-9a-f-]{36}")]
)
def test_multikey_haystacks_are_needles(name, form):
    for index in range(5):
        sample = parse(name)[0].sample(words, 2048, index)
        needles = NEEDLE.findall(sample.prompt)
        assert len(needles) == len(sample.prompt.split("\n")) - 2 > 20
        (value,) = sample.answers
        keys, values = [needle[1] for needle in needles], [needle[2] for needle in needles]
        assert len(set(keys)) == len(set(values)) == len(needles)
        assert all(re.fullmatch(form, value) for value in values)
        assert sample.prompt.count(value) == 1
        assert f" for {keys[values.index(value)]} mentioned" in sample.prefix


@given(st.integers(1, 50), st.data(), st.randoms(use_true_random=False))
def test_items_precede_different_lines_in_order(count, data, rng):
    lines = [f"line {i}" for i in range(count)]
    items = [f"item {i}" for i in range(data.draw(st.integers(0, count)))]
    placed = niah.among_lines(rng, lines, items).split("\n")
    assert [line for line in placed if line in lines] == lines
    assert [line for line in placed if line in items] == items
    assert (
        all(below in lines for line, below in pairwise(placed) if line in items)
        and placed[-1] in lines
    )


def test_essays_contain_the_needles(files):
    for name, (keys, values, wanted) in ESSAYS.items():
        sample = parse(name, files)[0].sample(smollm2, 1024, 1)
        assert 0.9 * 1024 < spent(smollm2, sample) <= 1024, name
        needles = NEEDLE.findall(sample.prompt)
        assert len(needles) == keys * values, name
        asked = [value for _, key, value in needles if f" {key}" in sample.prefix]
        assert sorted(asked) == sorted(sample.answers), name
        assert len(sample.answers) == wanted, name
        assert all(sample.prompt.count(one) == 1 for one in asked), name
        assert ("are hidden" in sample.prompt) == (wanted > 1), name
        assert "Essay sentence 0 speaks of startups and of 0 painters!" in sample.prompt, name
        assert (", and " in sample.prefix) == (name == "niah_multiquery"), name


@given(st.integers(1, 300), st.integers(1, 4), st.randoms(use_true_random=False))
def test_needles_are_between_sentences_in_order(count, needles, rng):
    text = [f"{i}{'.' if i % 5 == 4 else ''}" for i in range(count)]
    items = [f"<{i}>" for i in range(needles)]
    placed = ruler_files.among_sentences(rng, text, items).split()
    assert [word for word in placed if word not in items] == text
    assert [word for word in placed if word in items] == items
    before = [placed[i - 1] for i, word in enumerate(placed) if word in items and i]
    assert all(word in items or word.endswith(".") or word == text[-1] for word in before)


def test_vt_follows_one_chain_after_an_example():
    for sample in samples("vt"):
        shown, _, asked = sample.prompt.partition("\n\nMemorize")
        new, old = zip(*re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)", asked), strict=True)
        assert new == sample.answers and len(set(new)) == 5
        value, *chain = old
        assert tuple(chain) == new[:-1] and re.fullmatch(r"\d{5}", value)
        assert asked.endswith(f"assigned the value {value} in the text above.")
        assert sample.prefix.endswith(f"5 variables are assigned the value {value}, they are: ")
        example = re.findall(r"VAR ([A-Z]{3}) = ", shown)
        assert len(example) == 5 and shown.endswith(f"they are:  {' '.join(example)}")
        assert 450 < len(words(shown)) <= 500
        assert not re.search(r"VAR [A-Z]{5}\b", shown)


def counts_of(text):
    """Counts each word of a numbered list."""
    listed = re.search(r"\n1\. (.*)\nQuestion", text)
    assert listed, text
    return Counter(re.split(r" \d+\. ", listed[1]))


def test_cwe_counts():
    for length, common, uncommon, (often, seldom, words_shown) in CWE_COUNTS:
        for sample in samples("cwe", length, 3):
            shown, _, asked = sample.prompt.partition(
                " Answer: The top 10 words that appear most often in the list are:"
            )
            found, _, asked = asked.partition("\nBelow")
            counts = counts_of(asked)
            assert [counts.pop(answer) for answer in sample.answers] == [common] * 10, length
            assert set(counts.values()) == {uncommon}, length
            counts = counts_of(shown)
            assert len(counts) == words_shown, length
            answers = re.split(r" ?\d+\. ", found)[1:]
            assert [counts.pop(answer) for answer in answers] == [often] * 10, length
            assert set(counts.values()) == {seldom}, length


def min_length(name):
    with pytest.raises(ValueError, match="length=1: must be at least") as error:
        parse(name)[0].sample(words, 1, 0)
    return int(re.findall(r"at least (\d+)", str(error.value))[0])


def test_fwe_follows_zipfs_law():
    for length in (min_length("fwe"), 1024):
        assert_zipf(length)


def assert_zipf(length):
    for sample in samples("fwe", length, 5):
        coded = sample.prompt.split("coded words. ")[1].split("\nQuestion")[0].split()
        ranked = Counter(coded).most_common()
        assert ranked[0][0] == "..." and tuple(word for word, _ in ranked[1:4]) == sample.answers
        assert ranked[3][1] > ranked[4][1]
        assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked[1:])
        assert len(ranked) <= max((length - 50) // 50, 6)
        expected = [ranked[0][1] / rank**2 for rank in range(1, len(ranked) + 1)]
        assert all(
            abs(count - wanted) <= 1 for (_, count), wanted in zip(ranked, expected, strict=True)
        )


def test_qa_1_has_the_paragraph_and_the_rest_of_its_article(files):
    (task,) = parse("qa_1", files)
    assert task.num_samples == 20
    for index in (0, 7, 19):
        sample = task.sample(words, 400, index)
        article, paragraph = divmod(index, 4)
        assert (
            sample.prompt.endswith(f"\n\nQuestion: What of {article}.{paragraph}?")
            and sample.prefix == " Answer:"
        )
        shown = re.findall(r"Document (\d+):\nArticle (\d) paragraph (\d):", sample.prompt)
        assert [int(number) for number, *_ in shown] == list(range(1, len(shown) + 1))
        assert (str(article), str(paragraph)) in [(a, p) for _, a, p in shown]
        assert (
            sum(int(a) == article for _, a, _ in shown)
            == 4
            < len(shown)
            == sample.meta["documents"]
        )
        assert sample.answers == ("Yes",)
        assert task.score("Oh yes!", sample) == 1


def test_qa_2_has_all_ten_paragraphs_and_repeats_them_to_fill_the_length(files):
    (task,) = parse("qa_2", files)
    for length in (1024, 8192):
        sample = task.sample(words, length, 3)
        assert 0.9 * length < spent(words, sample) <= length
        assert {f"Title 3.{i}\nFirst. Then" for i in range(10)} <= set(
            re.findall(r"Title 3\.\d\nFirst. Then", sample.prompt)
        )
    assert len(re.findall("Title 3.0", sample.prompt)) > 1
    with pytest.raises(ValueError, match="index=6: must be from 0, qa_2 has 6 samples"):
        task.sample(words, 1024, 6)


def test_missing_files_are_named(tmp_path):
    for name in [*ESSAYS, "qa_1", "qa_2"]:
        file = {"qa_1": "squad.json", "qa_2": "hotpotqa.json"}.get(name, "PaulGrahamEssays.json")
        with pytest.raises(ValueError, match=f"files=None: {name} needs {file}"):
            parse(name)
        with pytest.raises(ValueError, match=f"files='{tmp_path}': {name} needs {file}"):
            parse(name, tmp_path)


def test_without_wonderwords(monkeypatch):
    niah.word_list.cache_clear()
    ruler.all_words.cache_clear()
    monkeypatch.setitem(sys.modules, "wonderwords.assets", None)
    for name in ("niah_single_1", "niah_grid", "cwe", "json_retrieval"):
        with pytest.raises(ValueError, match=r"wonderwords: .*pip install '\.\[eval\]'"):
            parse(name)
