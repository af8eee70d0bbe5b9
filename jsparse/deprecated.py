"""Old names, which work until 0.3 with a DeprecationWarning."""

import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# modules that moved, by their old names
MOVED = {
    f"jsparse.{old}": f"jsparse.{new}"
    for old, new in {
        "decode": "runtime.decode_step",
        "evaluation.forcing": "evaluation.teacher_forcing",
        "evaluation.longbench": "evaluation.tasks.longbench",
        "evaluation.measures": "evaluation.evaluators",
        "evaluation.niah": "evaluation.tasks.niah",
        "evaluation.passkey": "evaluation.tasks.passkey",
        "evaluation.plots": "evaluation.report.plots",
        "evaluation.results": "evaluation.store",
        "evaluation.ruler": "evaluation.tasks.ruler",
        "evaluation.runner": "evaluation.plan",
        "evaluation.sample": "evaluation.tasks.sample",
        "evaluation.statistics": "evaluation.report.statistics",
        "evaluation.table": "evaluation.report.table",
        "evaluation.together": "evaluation.shared_prefill",
        "loop": "runtime.session",
        "output": "host_reader",
        "pallas_kernels.select": "pallas_kernels.threshold_select",
        "policies.full": "policies.all_pages",
        "policies.wrappers": "policies.combinators",
        "prefill": "runtime.prefill",
        "sampling": "runtime.sampling",
        "scoring": "runtime.scoring",
        "train.minmax": "train.lagrangian",
    }.items()
}


def warn(old: str, new: str) -> None:
    """Warn the nearest caller outside of jsparse that `old` is now called `new`."""
    warnings.warn(
        f"{old} is now {new}; the old name goes in jsparse 0.3",
        DeprecationWarning,
        skip_file_prefixes=(os.path.dirname(__file__), "<frozen importlib"),
    )


def renamed_arguments(**names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a function take keyword arguments by their old names, too.

    The wrapper's `translate` maps such arguments to the new names. An old argument that is None
    counts as not given.

    Args:
        **names: the new name of each old one; several old ones may have become one.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def translate(given: Mapping[str, Any]) -> dict[str, Any]:
            new = {name: value for name, value in given.items() if name not in names}
            used = [name for name in given if name in names]
            if used:
                become = dict.fromkeys(names[old] for old in used)
                warn("=, ".join(used) + "=", "=, ".join(become) + "=")
            for old in used:
                value = given[old]
                if value is None:
                    continue
                if names[old] in new:
                    raise ValueError(
                        f"{old}={value!r}: must not be given beside "
                        f"{names[old]}={new[names[old]]!r}"
                    )
                new[names[old]] = value
            return new

        @functools.wraps(function)
        def wrapper(*args: Any, **given: Any) -> Any:
            return function(*args, **translate(given))

        wrapper.__dict__["translate"] = translate
        return wrapper

    return decorate


class _MovedModules(MetaPathFinder, Loader):
    """Finds a module that moved under its old name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        warn(spec.name, MOVED[spec.name])
        return importlib.import_module(MOVED[spec.name])

    def exec_module(self, module: ModuleType) -> None:
        """It has run under its new name."""


def find_moved_modules() -> None:
    """Let `import` find modules that moved under their old names."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(_MovedModules())
