"""Tests the choice of tests, and that their cache of programs stays small."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import trim
from tests.support.tiers import PARTS, NoJax, part_of

pytestmark = pytest.mark.pure
TESTS = Path(__file__).parent


def test_every_slow_test_has_one_part_and_parts_are_balanced():
    names = [f"tests/test_x.py::test_y[{nth}]" for nth in range(800)]
    sizes = [sum(part_of(name) == part for name in names) for part in range(PARTS)]
    assert sum(sizes) == 800
    assert min(sizes) > 60


def test_pure_tests_cannot_import_jax():
    with pytest.raises(ImportError, match="must not import jax"):
        NoJax().find_spec("jax")
    assert NoJax().find_spec("jaxtyping") is None


def test_most_recently_used_files_are_kept(tmp_path):
    for nth in range(5):
        file = tmp_path / f"{nth}"
        file.write_bytes(bytes(10))
        os.utime(file, (100 - nth, 100 - nth))
    trim(tmp_path, 30)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0", "1", "2"]
    trim(tmp_path / "none", 30)


def run(folder: Path, *options: str, **environment: str) -> str:
    """Runs pytest on a folder of tests, with this project's plugins."""
    plugins = ("no:cacheprovider", "tests.support.tiers", "tests.support.programs")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *(f"-p{each}" for each in plugins), *options],
        cwd=folder,
        env={"PYTHONPATH": str(TESTS.parent), "JAX_COMPILATION_CACHE_DIR": str(folder), "PATH": ""}
        | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return ran.stdout


@pytest.mark.slow
def test_tests_that_cannot_run_are_counted_and_slow_tests_are_split(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n  browser\n")
    (tmp_path / "test_x.py").write_text(
        "import pytest\n"
        "@pytest.mark.browser\ndef test_page(): pass\n"
        "@pytest.mark.slow\n@pytest.mark.parametrize('n', range(16))\ndef test_slow(n): pass\n"
        "def test_plain(): pass\n"
    )
    parts = [part_of(f"test_x.py::test_slow[{nth}]") for nth in range(16)]
    output = run(tmp_path, "--part=11")
    assert f"{1 + parts.count(3)} passed, {16 - parts.count(3) + 1} deselected" in output
    assert "left out here: 1 test needs Chromium" in output


@pytest.mark.slow
def test_test_with_too_many_programs_is_reported_and_fails_in_ci(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    (tmp_path / "test_x.py").write_text(
        "import jax, numpy, pytest\nfrom tests.support.programs import shared\n"
        "def ask(count):\n"
        "    for nth in range(count):\n"
        "        jax.jit(lambda x, nth=nth: x * nth + 1)(numpy.ones(3))\n"
        "def test_many(): ask(13)\n"
        "def test_few(): ask(12)\n"
        "def test_shared(): shared(ask)(13)\n"
        "@pytest.mark.slow\ndef test_slow(): ask(13)\n"
    )
    said = "13 programs: must compile at most 12: share a shape or mark it slow"
    output = run(tmp_path, JSPARSE_PROGRAM_BUDGET="1")
    assert "1 failed, 3 passed" in output and said in output
    output = run(tmp_path)
    assert "4 passed" in output and f"test_x.py::test_many: {said}" in output
