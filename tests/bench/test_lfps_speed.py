"""Tests bench.lfps_speed: a line for each contender, and the parts that its kernels belong to."""

import pytest

from bench.lfps_speed import main, parts


@pytest.mark.slow
def test_a_tiny_run_has_a_line_for_each_contender(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["lfps_speed", "--tiny", "--allow-modified"])
    main()
    lines = capsys.readouterr().out.splitlines()
    names = [line[14:26].strip() for line in lines]
    kinds = ("quest", "lfps", "exact")
    assert names == ["dense", *(f"{kind} {share}" for kind in kinds for share in ("2%", "4%"))]
    assert all(float(line[26:].split()[0]) > 0 for line in lines)


def test_kernels_are_summed_up_by_part():
    names = ["candidates_kernel", "attend_kernel", "_merge", "fusion", "update_kernel"]
    names += ["listed_products_kernel", "select_kernel"]
    kernels = {
        name: {"us": float(2**nth), "launches": 1 + (name == "attend_kernel")}
        for nth, name in enumerate(names)
    }
    found = parts({"by_kernel": kernels})
    attend = 2 * 2 + 4
    assert found == {
        "candidates": 1,
        "products": 32,
        "choose": 64,
        "attend": attend,
        "update": 16,
    }
    assert parts({"by_kernel": {"attend_kernel": {"us": 1.0, "launches": 1}}}) == parts({}) == {}
