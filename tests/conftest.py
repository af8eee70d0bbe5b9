"""Configures all tests: one compilation cache, warnings as errors, hypothesis.

With JSPARSE_CHECK_TYPES set, array shapes and dtypes are checked against their annotations. jax is
not imported here, because pure tests must run without it.
"""

import hashlib
import importlib
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
if sys.dont_write_bytecode:
    # One folder of bytecode outside the sources, so that workers and subprocesses do not compile
    # their own.
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(ROOT / ".pytest_cache" / "pycache")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # missing under python -B
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
# jax reads all of these on import. Several processes may share a GPU. On a CPU most of a test's
# time is compilation, so LLVM does not optimise, MLIR does not lower loops (which takes twice as
# long as all else), and programs are not split for parallel codegen. XLA's own passes stay at their
# defaults.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # never read
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")  # for models spread over several devices
if os.environ.get("JAX_PLATFORMS") == "cpu" or not Path("/dev/nvidiactl").exists():
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
        "--xla_cpu_parallel_codegen_split_count=1 "
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    )


def compilation_cache() -> Path:
    """Returns the folder of programs compiled for tests by this jaxlib for this CPU.

    All workers and all checkouts share it. It is in $XDG_CACHE_HOME or ~/.cache.
    """
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else [platform.processor()]
    named = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    kind = "\n".join([os.environ.get("XLA_FLAGS", ""), *sorted(named or lines)])
    digest = hashlib.sha256(kind.encode()).hexdigest()[:12]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "jsparse-tests" / f"jaxlib-{version('jaxlib')}-{digest}"


os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(compilation_cache()))
os.environ.setdefault("JSPARSE_CACHE_DIR", str(ROOT / ".pytest_cache" / "jsparse"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

try:
    import jsparse  # noqa: F401
except ImportError as error:  # the checkout has no symbolic links
    raise SystemExit(str(error)) from None

# functions that run, and functions that they compile
pytest_plugins = ("tests.support.tiers", "tests.support.programs")

# Modules that check user input themselves, or that have incomplete annotations
UNCHECKED = {
    "generation",
    "parts",
    "policies.clusters.engine",
    "policies.head_gates",
    "ranks",
    "runtime.admission",
    "runtime.state_axes",
    "runtime.request",
    "runtime.sampling",
    "runtime.session",
    "runtime.shared_pages",
    "runtime.speculation",
}
FOLDERS = (
    "cache", "host_memory", "models", "pallas_kernels", "policies", "runtime", "selection", "train",
)  # fmt: skip


def array_modules() -> list[str]:
    """Returns the modules whose array annotations are checked.

    Builders of policies and the api.py of kernels check their arguments themselves.
    """
    package, found = ROOT / "jsparse", []
    files = [*package.glob("*.py")]
    for folder in FOLDERS:
        files += (package / folder).glob("**/*.py")
    for file in files:
        name = ".".join(file.relative_to(package).with_suffix("").parts).removesuffix(".__init__")
        text = file.read_text(encoding="utf-8")
        annotates = "from jaxtyping import" in text and "@builder" not in text
        if annotates and file.name != "api.py" and name not in UNCHECKED:
            found.append(f"jsparse.{name}")
    return found


if os.environ.get("JSPARSE_CHECK_TYPES"):
    importlib.import_module("tests.support.array_types")
    install_import_hook(array_modules(), "tests.support.array_types.checked")

# the nightly run draws new examples
settings.register_profile("jsparse", deadline=None, derandomize="CI_FULL" not in os.environ)
settings.load_profile("jsparse")


@pytest.fixture
def figures(monkeypatch):
    """The list of figures that matplotlib saves, as objects."""
    from matplotlib.figure import Figure

    saved = []
    save = Figure.savefig

    def savefig(figure, *args, **kwargs):
        saved.append(figure)
        return save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return saved
