"""Tests the figure of bench.plot_acceptance."""

import pytest

from bench import plot_acceptance

pytestmark = pytest.mark.pure


def report(temperature, drafts):
    def text(tokens):
        return {"tokens_per_round": tokens, "accepted_share": tokens / 10}

    rows = [
        {"policy": policy, "drafts": number, "texts": {"verse": text(2.0), "code": text(number)}}
        for policy in ("quest(budget=8)", "dense()")
        for number in drafts
    ]
    # dense attention beside itself
    rows.append({"policy": "dense", "rows": 2})
    return {"temperature": temperature, "results": rows}


OLDER = {
    "temperature": 0.0,
    "rows": [
        {
            "policy": "lfps()",
            "drafts": 2,
            "text": text,
            **report(0.0, (2,))["results"][0]["texts"][of],
        }
        for text, of in (("prose", "verse"), ("code", "code"))
    ],
}


def test_lines_and_shares():
    both = [report(0.0, (4, 2)), OLDER]
    assert plot_acceptance.lines(both)["dense()"] == [(2, 2.0), (4, 3.0)]
    assert plot_acceptance.lines(both)["lfps()"] == [(2, 2.0)]
    shares = plot_acceptance.shares([report(1.0, (4,)), OLDER])
    assert shares["dense()"] == {"verse": 20.0, "code": 40.0}
    assert shares["lfps()"] == {"prose": 20.0, "code": 20.0}


def test_it_draws(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "figures" / "acceptance.png"
    plot_acceptance.draw([report(0.0, (2, 4))], [report(1.0, (4,))], file)
    assert file.stat().st_size > 5000
