"""Refuse to build from a checkout without symbolic links; pyproject.toml says everything else."""

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).parent))
try:
    import jsparse  # noqa: F401
except ImportError as error:
    raise SystemExit(str(error)) from None

setup()
