"""Benchmarks are run from the root of a checkout and installed nowhere."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
