"""Tests the page of `jsparse inspect` in a browser."""

import numpy as np
import pytest

from jsparse.evaluation.inspection import Inspection
from jsparse.evaluation.report.inspect_page import page
from tests.support.browser import Browser, needs_chromium

pytestmark = needs_chromium
TEXT = (
    "The older lighthouse stands on the western rocks and shows a red light. The newer one is a "
    "steel mast at the end of the pier, and its light is green."
)


def made_up() -> Inspection:
    """A step of a model of five layers and three heads, with layer 2 dense."""
    words = [f" {word}" for word in TEXT.split()]
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.full(len(words), 0.2), (5, 3)).astype(np.float32)
    attended = weights >= np.sort(weights, axis=2)[:, :, -8:-7]
    attended[2], weights[2] = True, 0
    return Inspection(
        model="smollm2",
        policy="quest(budget=8)",
        tokens=words,
        prompt_tokens=26,
        next_token=" Ships",
        attended=attended,
        weights=weights,
        fell_back=(2,),
    )


@pytest.fixture(scope="module")
def browser():
    opened = Browser()
    yield opened
    opened.close()


@pytest.fixture
def opened(browser, tmp_path):
    file = tmp_path / "step.html"
    file.write_text(page(made_up()), encoding="utf-8")
    browser.errors.clear()
    browser.requests.clear()
    browser.look(1100, 900)
    browser.open(file.as_uri())
    return browser


def status(browser):
    return browser.text("#status")


def test_arrow_keys_move_over_the_map(opened):
    shown = made_up()
    opened.run("document.querySelector('#map').focus()")
    assert "token 31 of 31 (generated)" in status(opened)
    for key, layer, token in (("ArrowDown", 1, 31), ("ArrowLeft", 1, 30), ("Home", 1, 1)):
        opened.run(
            f"document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}'}}))"
        )
        count = shown.attended[layer, :, token - 1].sum()
        assert status(opened).startswith(f"Layer {layer}, all heads, token {token} of 31")
        assert f"attended to by {count} of 3 heads" in status(opened)
    opened.run(
        "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowDown'}))"
    )
    assert "this layer was dense in this step" in status(opened)
    assert not opened.errors


def test_head_can_be_selected_and_tokens_are_shown(opened):
    shown = made_up()
    opened.run(
        "for (const [id, value] of [['layer', 3], ['head', 1]]) {"
        " const at = document.getElementById(id); at.value = value;"
        " at.dispatchEvent(new Event('change')); }"
    )
    assert opened.text("#title") == "Text as layer 3 sees it"
    titles = opened.run("[...document.querySelectorAll('#text span')].map((each) => each.title)")
    said = ["not attended to" not in title for title in titles]
    np.testing.assert_array_equal(said, shown.attended[3, 1])
    assert opened.run("document.querySelectorAll('#text .made').length") == 5
    assert not opened.errors


def test_page_fetches_nothing_and_fits_a_phone(opened):
    assert [url for url in opened.requests if not url.startswith("file:")] == []
    for width, scheme in ((360, "dark"), (360, "light"), (1100, "dark"), (1100, "light")):
        opened.look(width, 800, scheme)
        assert opened.run("document.documentElement.scrollWidth") <= width
    assert not opened.errors
