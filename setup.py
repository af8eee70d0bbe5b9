"""Refuse to build from a checkout without symbolic links; pyproject.toml says everything else."""

from pathlib import Path

for name in ("models", "train", "pallas_kernels"):
    link = Path(__file__).parent / "jsparse" / name
    if not link.is_dir():
        raise SystemExit(
            f"{link} must be a link to the folder {name} of the checkout, which was made without "
            "symbolic links: clone again with `git clone -c core.symlinks=true`, or install a wheel"
        )

from setuptools import setup

setup()
