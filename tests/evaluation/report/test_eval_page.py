"""Tests the page of `jsparse eval --report` on made-up results."""

import json
import re

import pytest

from jsparse.evaluation.report.eval_page import page
from jsparse.evaluation.report.table import MARKED, NOTE
from tests.support.browser import Browser, needs_chromium
from tests.support.made_up_report import SHORT, report

DOT = "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 4 3'/>"


@pytest.fixture(scope="module")
def made():
    return page(report(), {"quality": {"KL, 1K tokens": DOT}})


def data_of(text):
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return json.loads(data)


def test_page_has_every_policy_column_and_sample(made):
    data = data_of(made)
    assert [row["policy"] for row in data["rows"]] == list(SHORT)
    labels = {f"{column['task']} {column['label']}" for column in data["columns"]}
    assert {"drift KL, 1K", "niah_grid score %, 4K", "drift attended %, 1K"} <= labels
    assert all(len(row["values"]) == len(data["columns"]) for row in data["rows"])
    (nth,) = [
        nth
        for nth, column in enumerate(data["columns"])
        if (column["task"], column["label"]) == ("niah_grid", "score %, 1K")
    ]
    scores = [row["values"][nth]["value"] for row in data["rows"]]
    assert scores == [1, 7 / 8, 6 / 8, 5 / 8]
    assert data["rows"][1]["values"][nth]["text"].startswith("87.5 (-12.5")
    # vt, which dense attention never solves, is marked
    assert [c["left_out"] for c in data["columns"] if c["task"] == "vt"].count(True) == 2
    cells = report()["cells"]
    assert [len(cell["samples"]) for cell in data["cells"]] == [len(c["samples"]) for c in cells]
    assert data["note"] == f"{MARKED} {NOTE}"
    # the map by head has no values by sample
    assert not any("attended_heads" in s["meta"] for cell in data["cells"] for s in cell["samples"])
    assert data["plots"] == [
        {
            "title": "Quality over the share of tokens attended to",
            "panels": [["KL, 1K tokens", DOT]],
        }
    ]


def test_outputs_cannot_close_the_script():
    given = report()
    given["cells"][0]["samples"][0]["meta"] = {"text": "</script><b>", "answers": ["7", "8"]}
    made = page(given, {})
    assert "</script><b>" not in made
    meta = data_of(made)["cells"][0]["samples"][0]["meta"]
    assert meta == {"text": "</script><b>", "answers": ["7", "8"]}


@pytest.fixture(scope="module")
def browser():
    opened = Browser()
    yield opened
    opened.close()


@pytest.fixture
def opened(browser, made, tmp_path):
    file = tmp_path / "report.html"
    file.write_text(made, encoding="utf-8")
    browser.errors.clear()
    browser.requests.clear()
    browser.look(1100, 900)
    browser.open(file.as_uri())
    return browser


def column(browser, nth):
    cells = f"#table tbody td:nth-child({nth + 1})"
    return browser.run(f"[...document.querySelectorAll('{cells}')].map((each) => each.innerText)")


class TestInABrowser:
    pytestmark = needs_chromium

    def test_columns_are_sorted_by_keyboard(self, opened, made):
        names = [(each["task"], each["label"]) for each in data_of(made)["columns"]]
        nth = names.index(("drift", "KL, 1K"))
        assert column(opened, 0) == list(SHORT)
        opened.run(f"document.querySelectorAll('#table th button')[{nth + 1}].focus()")
        opened.press("Enter")
        assert column(opened, 0) == list(SHORT)
        opened.press("Enter")
        assert column(opened, 0) == list(SHORT)[::-1]
        kept = "document.querySelector('th[aria-sort=descending]').innerText"
        assert opened.run(kept).startswith("KL, 1K")
        first = "document.querySelector('th[scope=colgroup]')"
        heads = f"[{first}.innerText, {first}.colSpan]"
        assert opened.run(heads) == ["drift", sum(task == "drift" for task, _ in names) // 2]
        picture = "document.querySelector('figure img')"
        opened.until(f"{picture}.naturalWidth > 0")
        assert opened.run(f"{picture}.alt") == "KL, 1K tokens"
        assert not opened.errors

    def test_samples_open(self, opened):
        opened.run(
            "document.querySelector('#task').value = 'niah_grid';"
            "document.querySelector('#task').dispatchEvent(new Event('change'))"
        )
        assert opened.run("document.querySelectorAll('#cells details').length") == 2 * len(SHORT)
        opened.run("document.querySelector('#cells summary').click()")
        opened.until("document.querySelectorAll('#cells details tbody tr').length === 8")
        assert "depth" in opened.text("#cells details thead")
        assert not opened.errors

    def test_page_fetches_nothing_and_fits_a_phone(self, opened):
        fetched = [url for url in opened.requests if not url.startswith(("file:", "data:"))]
        assert fetched == []
        for width, scheme in ((360, "dark"), (360, "light"), (1100, "dark"), (1100, "light")):
            opened.look(width, 800, scheme)
            assert opened.run("document.documentElement.scrollWidth") <= width
        assert not opened.errors
