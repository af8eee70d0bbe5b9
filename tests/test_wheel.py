"""Tests the installed files: one package, `jsparse`, with the linked folders inside it as real
files.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKED = ("models", "pallas_kernels", "train")


# `uv run` sets variables that name it; other entries of the path may belong to another Python, or
# only work here
UV = os.environ.get("UV") or shutil.which("uv") or "uv"
ELSEWHERE = {"cwd": ROOT.anchor, "capture_output": True, "check": False}
if not shutil.which(UV) or subprocess.run([UV, "--version"], **ELSEWHERE).returncode:
    pytest.skip("needs the command uv", allow_module_level=True)


def copy_of_sources(target: Path, *folders: str) -> None:
    """Copies folders with their links, and the other inputs of a build."""
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in folders:
        shutil.copytree(ROOT / folder, target / folder, symlinks=True, ignore=ignored)
    for file in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, target)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy of the sources with their links; a build leaves folders that would end up
    in later wheels.
    """
    source = tmp_path_factory.mktemp("source")
    copy_of_sources(source, "jsparse", *LINKED)
    command = [UV, "build", "--wheel", "--quiet", "--python", sys.executable]
    command += ["--out-dir", str(source / "dist")]
    subprocess.run(command, cwd=source, check=True)
    [built] = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def target(wheel, tmp_path_factory):
    """A folder with the wheel installed; its dependencies are those of the environment."""
    folder = tmp_path_factory.mktemp("target")
    command = [UV, "pip", "install", "--quiet", "--no-deps", "--python", sys.executable]
    command += ["--target", str(folder)]
    subprocess.run([*command, str(wheel)], check=True)
    return folder


@pytest.fixture
def without_links(tmp_path):
    """A copy of the sources as in a checkout without symbolic links."""
    copy_of_sources(tmp_path, "jsparse")
    for name in LINKED:
        link = tmp_path / "jsparse" / name
        target = os.readlink(link)
        link.unlink()
        link.write_text(target)
    return tmp_path


NO_LINKS = "must be a link to the folder models of the checkout, which was made without symbolic"


def test_import_without_links_reports_it(without_links, tmp_path):
    ran = _run("import jsparse", without_links, tmp_path)
    assert ran.returncode == 1
    [line] = [line for line in ran.stderr.splitlines() if line.startswith("ImportError: ")]
    assert NO_LINKS in line


def test_build_without_links_reports_it(without_links):
    ran = subprocess.run(
        [UV, "build", "--wheel", "--python", sys.executable],
        cwd=without_links,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode != 0
    assert NO_LINKS in " ".join(ran.stderr.split())
    assert "Traceback" not in ran.stderr


def test_pytest_without_links_reports_it(without_links):
    (without_links / "tests").mkdir()
    shutil.copy(ROOT / "tests/conftest.py", without_links / "tests")
    ran = _run("import pytest; pytest.main(['tests'])", without_links, without_links)
    assert ran.returncode == 1
    assert NO_LINKS in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.slow
def test_sdist_has_no_tests_rather_than_some(wheel):
    command = [UV, "build", "--sdist", "--quiet", "--python", sys.executable]
    source = wheel.parents[1]
    shutil.copytree(
        ROOT / "tests", source / "tests", ignore=shutil.ignore_patterns("fixtures", "__pycache__")
    )
    subprocess.run([*command, "--out-dir", str(source / "sdist")], cwd=source, check=True)
    [built] = (source / "sdist").glob("*.tar.gz")
    with tarfile.open(built) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert not [name for name in names if name.startswith(("tests", "bench"))]
    assert {"setup.py", "jsparse/models/config.py", "jsparse/__init__.pyi"} <= set(names)


def _run(code: str, target: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(target)}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_only_jsparse_is_at_the_top_level(wheel):
    top = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"jsparse"}


def test_every_source_file_is_included(wheel):
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    wanted = {str(file.relative_to(ROOT)) for file in (ROOT / "jsparse").rglob("*.py")}
    for folder in LINKED:
        wanted |= {f"jsparse/{file.relative_to(ROOT)}" for file in (ROOT / folder).rglob("*.py")}
    assert packed == wanted
    assert {
        "jsparse/models/transformer.py",
        "jsparse/pallas_kernels/block_sparse_decode/api.py",
    } <= packed
    data = {
        "jsparse/py.typed",
        "jsparse/__init__.pyi",
        "jsparse/policies/gates/smollm2.safetensors",
        "jsparse/policies/gates/smollm2_direct.safetensors",
        *(f"jsparse/server/page/{name}" for name in ("index.html", "page.js", "style.css")),
    }
    assert data | {"jsparse/evaluation/texts/shakespeare_1911.txt"} <= set(
        zipfile.ZipFile(wheel).namelist()
    )


def test_it_runs_from_another_directory(target, tmp_path):
    code = (
        "import jsparse, jsparse.models.transformer as t; jsparse.generate; "
        "print(jsparse.__file__); print(t.__file__)"
    )
    ran = _run(code, target, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert all(Path(line).is_relative_to(target) for line in ran.stdout.splitlines())
    assert len(ran.stdout.splitlines()) == 2


def test_bare_names_are_not_importable(target, tmp_path):
    for name in LINKED:
        assert "ModuleNotFoundError" in _run(f"import {name}", target, tmp_path).stderr
