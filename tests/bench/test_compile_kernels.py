"""Tests bench.compile_kernels where Triton is there; no GPU is needed."""

import json
import sys

import pytest

pytest.importorskip("triton", reason="needs the package triton")

import jax

from bench import compile_kernels
from bench.compile_kernels import Device, compiled, launched
from bench.lib.small_cases import OPS
from jsparse.pallas_kernels import dispatch

OP = OPS["place_logits"]
CASE = OP.cases["any"]


@pytest.fixture(scope="module")
def launch():
    (launch, *_) = launched(OP.call, CASE, OP.build(CASE), 90)
    return launch


def test_a_case_is_traced_and_nothing_is_left_behind(monkeypatch):
    monkeypatch.delitem(sys.modules, compile_kernels.CALL, raising=False)
    before = dispatch.no_triton
    (launch, *_) = launched(OP.call, CASE, OP.build(CASE), 90)
    kinds = list(launch.signature.values())
    assert kinds[0].startswith("*") and "constexpr" in kinds
    assert set(launch.constants) == {n for n, k in launch.signature.items() if k == "constexpr"}
    assert not isinstance(jax.local_devices()[0], Device) and dispatch.no_triton is before
    assert compile_kernels.CALL not in sys.modules


@pytest.mark.parametrize("arch", [80, 120])
def test_a_kernel_compiles_for_gpus_that_are_not_here(launch, arch):
    row = compiled(launch, arch)
    assert "error" not in row and 16 <= row["registers"] <= 255


def test_the_command_writes_a_row_per_kernel(monkeypatch, tmp_path, capsys):
    path = tmp_path / "x.json"
    given = ["--only", "place_logits", "--json", str(path), "--allow-modified"]
    monkeypatch.setattr(sys, "argv", ["compile_kernels", *given])
    with pytest.raises(SystemExit) as ended:
        compile_kernels.main()
    rows = json.loads(path.read_text())["results"]
    assert ended.value.code == 0 and len(rows) > 1 and {row["arch"] for row in rows} == {90}
    assert f"{len(rows)} compiled, 0 failed" in capsys.readouterr().out
