"""Configures all tests: one compilation cache, warnings as errors, hypothesis repeatable.

With JSPARSE_CHECK_TYPES set, array shapes and dtypes are checked against their annotations.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
if sys.dont_write_bytecode:
    # Beside no source, but neither by each worker and each command that tests start anew.
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(ROOT / ".pytest_cache" / "pycache")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # not there under python -B
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
# One cache of compiled programs for all workers and for the next run; jax reads these on import.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "jax"))
os.environ.setdefault("JSPARSE_CACHE_DIR", str(ROOT / ".pytest_cache" / "jsparse"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Several processes share a GPU, if there is one. On a CPU, most of a test's time is compilation:
# LLVM need not optimise, while XLA's own passes stay as users have them.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    )

import jax
import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

# The modules that take arrays. The others take what users write and check it themselves.
ARRAY_MODULES = (
    "cache",
    "host_pool",
    "key_constants",
    "models.layers",
    "models.transformer",
    "pallas_kernels.block_sparse_decode.reference",
    "pallas_kernels.bounds_append.reference",
    "pallas_kernels.centroid_update.reference",
    "pallas_kernels.centroid_scores.reference",
    "pallas_kernels.compact_pages.reference",
    "pallas_kernels.group_means.reference",
    "pallas_kernels.int4_append.reference",
    "pallas_kernels.int4_keys",
    "pallas_kernels.int4_scores.reference",
    "pallas_kernels.key_bounds",
    "pallas_kernels.merge_splits.reference",
    "pallas_kernels.nearest_centroid.reference",
    "pallas_kernels.page_bounds.reference",
    "pallas_kernels.place_logits.reference",
    "pallas_kernels.point_groups",
    "pallas_kernels.row_gather.reference",
    "pallas_kernels.row_scatter.reference",
    "pallas_kernels.runs_to_tokens.reference",
    "pallas_kernels.shared_counts.reference",
    "pallas_kernels.threshold_select.reference",
    "pallas_kernels.token_sparse_decode.reference",
    "pallas_kernels.window_attention.reference",
    "policies.clusters.chunking",
    "policies.eviction.merging",
    "policies.eviction.window",
    "partials",
    "runtime.constants",
    "runtime.correct",
    "runtime.decode_step",
    "runtime.host_attention",
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
if os.environ.get("JSPARSE_CHECK_TYPES"):
    install_import_hook([f"jsparse.{name}" for name in ARRAY_MODULES], "beartype.beartype")

MAPS, MOST_MAPS = Path("/proc/self/maps"), 30000

settings.register_profile("jsparse", deadline=None, derandomize=True)
settings.load_profile("jsparse")


def pytest_collection_modifyitems(items):
    """Skip tests marked gpu where there is none."""
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
    """Forget compiled programs before they use up a process's 65530 memory maps.

    The compiler segfaults then.
    """
    yield
    if MAPS.exists() and len(MAPS.read_bytes().splitlines()) > MOST_MAPS:
        jax.clear_caches()


@pytest.fixture
def figures(monkeypatch):
    """Return the list of figures that matplotlib saves, as objects."""
    from matplotlib.figure import Figure

    saved = []
    save = Figure.savefig

    def savefig(figure, *args, **kwargs):
        saved.append(figure)
        return save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return saved
