"""What all tests share: array shapes are checked against their annotations, and hypothesis is
repeatable.
"""

import os
import tempfile
from pathlib import Path

import jax
import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

# The modules that take arrays. The others take what users write, and say themselves what is wrong
# with it.
ARRAY_MODULES = (
    "cache",
    "models.layers",
    "models.transformer",
    "pallas_kernels.block_sparse_decode.reference",
    "pallas_kernels.bounds_append.reference",
    "pallas_kernels.compact_pages.reference",
    "pallas_kernels.int4_append.reference",
    "pallas_kernels.int4_keys",
    "pallas_kernels.int4_scores.reference",
    "pallas_kernels.key_bounds",
    "pallas_kernels.merge_splits.reference",
    "pallas_kernels.page_bounds.reference",
    "pallas_kernels.place_logits.reference",
    "pallas_kernels.row_gather.reference",
    "pallas_kernels.threshold_select.reference",
    "pallas_kernels.token_sparse_decode.reference",
    "partials",
    "runtime.correct",
    "runtime.decode_step",
    "runtime.prefill",
    "runtime.scoring",
    "selection",
    "threshold",
    "train.direct",
    "train.distill",
    "train.families",
    "train.hard_concrete",
    "train.hard_kuma",
    "train.lagrangian",
    "train.stretch_and_rectify",
)
# several processes share a GPU, if there is one
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# compilations of tests are no use to the next run, and not to be left in the user's folder
os.environ["JSPARSE_CACHE_DIR"] = tempfile.mkdtemp(prefix="jsparse-tests-")

install_import_hook([f"jsparse.{name}" for name in ARRAY_MODULES], "beartype.beartype")

MAPS, MOST_MAPS = Path("/proc/self/maps"), 30000

settings.register_profile("jsparse", deadline=None, derandomize=True)
settings.load_profile("jsparse")


def pytest_collection_modifyitems(items):
    """Tests of the mark `gpu` need one."""
    if jax.default_backend() != "gpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="module", autouse=True)
def _forget_compilations():
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def _stay_below_the_maps_of_a_process():
    """Compiled programs of many tests use up the memory maps of a process (65530), and the compiler
    segfaults.
    """
    yield
    if MAPS.exists() and len(MAPS.read_bytes().splitlines()) > MOST_MAPS:
        jax.clear_caches()


@pytest.fixture
def figures(monkeypatch):
    """What matplotlib saves, as objects, too."""
    from matplotlib.figure import Figure

    saved = []
    save = Figure.savefig

    def savefig(figure, *args, **kwargs):
        saved.append(figure)
        return save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return saved
