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
        "channel_calibration": "model_facts.channel_calibration",
        "chat": "cli.chat",
        "compilation": "runtime.compilation",
        "console": "cli.console",
        "decode": "runtime.decode_step",
        "evaluation.command": "cli.evaluate",
        "evaluation.forcing": "evaluation.teacher_forcing",
        "evaluation.longbench": "evaluation.tasks.longbench",
        "evaluation.longbench_metrics": "evaluation.tasks.longbench_metrics",
        "evaluation.measures": "evaluation.evaluators",
        "evaluation.niah": "evaluation.tasks.niah",
        "evaluation.passkey": "evaluation.tasks.passkey",
        "evaluation.plots": "evaluation.report.plots",
        "evaluation.results": "evaluation.store",
        "evaluation.ruler": "evaluation.tasks.ruler",
        "evaluation.ruler_files": "evaluation.tasks.ruler_files",
        "evaluation.runner": "evaluation.plan",
        "evaluation.sample": "evaluation.tasks.sample",
        "evaluation.statistics": "evaluation.report.statistics",
        "evaluation.table": "evaluation.report.table",
        "evaluation.together": "evaluation.shared_prefill",
        "generation_options": "cli.options",
        "loop": "runtime.session",
        "memory": "machine.memory",
        "model_info": "model_facts.info",
        "output": "runtime.host_reader",
        "pallas_kernels.int4_scores.sidecar": "pallas_kernels.int4_keys",
        "pallas_kernels.page_bounds.sidecar": "pallas_kernels.key_bounds",
        "pallas_kernels.select": "pallas_kernels.threshold_select",
        "pallas_kernels.threshold_select.rules": "pallas_kernels.threshold_select.api",
        "policies.full": "policies.all_pages",
        "policies.wrappers": "policies.combinators",
        "prefill": "runtime.prefill",
        "prompts": "text.prompts",
        "sampling": "runtime.sampling",
        "scoring": "runtime.scoring",
        "text_stream": "text.stream",
        "train.minmax": "train.lagrangian",
        "train.run": "cli.train_gates",
        "train.stretched": "train.stretch_and_rectify",
    }.items()
}
# policies, by their old names
RENAMED = {"full": "all_pages"}
GOES = "the old name goes in jsparse 0.3"
Check = Callable[[Mapping[str, Any]], None]


def warn(old: Sequence[str], new: Sequence[str]) -> None:
    """Warn the nearest caller outside of jsparse that `old` are now called `new`."""
    warnings.warn(
        f"{', '.join(old)} {'is' if len(old) == 1 else 'are'} now {', '.join(new)}; {GOES}",
        DeprecationWarning,
        skip_file_prefixes=(os.path.join(os.path.dirname(__file__), ""), "<frozen importlib"),
    )


def renamed_arguments(check: Check | None = None, /, **names: str) -> Callable[..., Any]:
    """Let a function take keyword arguments by their old names, too.

    An old argument that is None counts as not given.

    Args:
        check: what else must hold of arguments with old names among them; raises ValueError.
        **names: the new name of each old one; several old ones may have become one.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def translate(given: Mapping[str, Any]) -> dict[str, Any]:
            new = {name: value for name, value in given.items() if name not in names}
            used = [name for name in given if name in names]
            if not used:
                return new
            become = dict.fromkeys(names[old] for old in used)
            warn([f"{old}=" for old in used], [f"{name}=" for name in become])
            if check is not None:
                check(given)
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

        return wrapper

    return decorate


def moved_names(module: str, **homes: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module whose names moved or were renamed.

    Args:
        module: the module's name.
        **homes: where each old name is now, as "package.module:name".
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, new = homes[name].partition(":")
        warn([f"{module}.{name}"], [f"{home}.{new}"])
        return getattr(importlib.import_module(home), new)

    return find


class _MovedModules(MetaPathFinder, Loader):
    """Finds a module that moved, or a module within it, under its old name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if self._new_name(fullname) is None else ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the new name in place of this one."""
        new = self._new_name(module.__name__)
        warn([module.__name__], [str(new)])
        sys.modules[module.__name__] = importlib.import_module(str(new))

    def _new_name(self, name: str) -> str | None:
        for old, new in MOVED.items():
            if name == old or name.startswith(f"{old}."):
                return new + name.removeprefix(old)
        return None


def find_moved_modules() -> None:
    """Let `import` find modules that moved under their old names."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        # before the finder of files, which would load a submodule of an alias a second time
        sys.meta_path.insert(0, _MovedModules())
