"""Check that no module imports from a floor above its own, and that there are no import cycles.

Usage: python .ci/import_floors.py [ROOT]

It prints such imports, and the figures of the package graph: arrows, from each package to those it
imports from; levels, the length of the longest chain of arrows; and cycles of packages or modules.
Imports for types count in cycles of modules.
"""

import ast
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# The rooms and modules of each floor, from the ground up, below jsparse.
FLOORS = (
    (
        "vocabulary",
        "cache",
        "selection",
        "shapes",
        "heads",
        "parts",
        "names",
        "ranks",
        "machine",
        "hyper_parameters",
    ),
    ("kernels", "pallas_kernels", "host_memory"),
    ("models", "models"),
    ("contract", "policy", "hooks", "builder"),
    ("policies", "policies", "extend"),
    ("runtime", "runtime", "text", "generation", "conversation", "cached_prompt"),
    ("above runtime", "evaluation", "train", "engine"),
    ("server and benchmark", "server", "benchmark"),
    ("cli", "cli", "__main__"),
)
# models is separate: from the lower floors it uses only these modules, which do not depend on
# caches
FOR_MODELS = {
    "machine.jax_settings",
    "machine.memory",
    "machine.processes",
    "machine.extras",
    "names",
    "parts",
    "ranks",
    "hyper_parameters",
    "shapes",
    "heads",
    "pallas_kernels.weight_blocks",
    "pallas_kernels.expert_choice",
    "pallas_kernels.expert_product",
    "pallas_kernels.gated_product",
    "pallas_kernels.linear",
    "pallas_kernels.norm_product",
    "pallas_kernels.quantized_product",
    "pallas_kernels.residual_norm",
}
# packages of one floor that do not import each other
BESIDE = {"evaluation", "train", "engine"}


def floor(module: str) -> tuple[int, str]:
    """Returns the number and name of a module's floor; `module` lacks the leading `jsparse.`."""
    for number, (name, *tops) in enumerate(FLOORS):
        if module.split(".")[0] in tops:
            return number, name
    raise SystemExit(f"jsparse.{module} belongs to no floor: add it to FLOORS in {__file__}")


def public_names(package: Path) -> dict[str, str]:
    """Returns the module, below `jsparse.`, of each name that jsparse itself exports."""
    stub = package / "__init__.pyi"
    tree = ast.parse(stub.read_text(encoding="utf-8") if stub.exists() else "")
    return {
        alias.asname or alias.name: str(node.module).removeprefix("jsparse.")
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def imports(path: Path, public: dict[str, str]) -> Iterator[tuple[int, str, bool]]:
    """Yields line and target, below `jsparse.`, of every import, and whether it is for types.

    An attribute of a plain `import jsparse` counts as imported from its module.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        targets = []
        if isinstance(node, ast.ImportFrom) and node.level:
            raise SystemExit(f"{path}:{node.lineno}: a relative import hides its floor")
        if isinstance(node, ast.ImportFrom) and node.module == "jsparse":
            names = (alias.name for alias in node.names if alias.name != "__version__")
            targets = [public.get(name, name) for name in names]
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("jsparse."):
            # the imported name may be a module
            module = str(node.module).removeprefix("jsparse.")
            targets = [f"{module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found = (alias.name for alias in node.names if alias.name.startswith("jsparse."))
            targets = [name.removeprefix("jsparse.") for name in found]
        elif (
            isinstance(node, ast.Attribute)
            and node.attr in public
            and getattr(node.value, "id", "") == "jsparse"
        ):
            targets = [public[node.attr]]
        for target in targets:
            yield node.lineno, target, id(node) in typing


@functools.cache
def modules(package: Path) -> dict[str, list[tuple[int, str, bool]]]:
    """Returns the imports of each module of the package, by its name below `jsparse.`."""
    public, found = public_names(package), {}
    walked = os.walk(package, followlinks=True)
    for file in sorted(Path(folder, name) for folder, _, names in walked for name in names):
        if file.suffix == ".py" and file != package / "__init__.py":
            name = ".".join(file.relative_to(package).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = [*imports(file, public)]
    return found


def violations(root: Path) -> tuple[int, list[str]]:
    """Returns the number of modules in `root`/jsparse and a line per import up or across."""
    package, found = root / "jsparse", []
    for module, targets in modules(package).items():
        number, name = floor(module)
        for line, target, for_types in targets:
            if for_types:
                continue
            above, there = floor(target)
            own = any(f"{target}.".startswith(f"{module}.") for module in FOR_MODELS)
            apart = name == "models" and there != name and not own
            pair = {module.split(".")[0], target.split(".")[0]}
            across = len(pair) == 2 and pair <= BESIDE
            if above > number or apart or across:
                file = module.replace(".", "/")
                file += "/__init__.py" if (package / file).is_dir() else ".py"
                found.append(f"jsparse/{file}:{line}: {name} imports {there} (jsparse.{target})")
    return len(modules(package)), found


def graph(package: Path, *, types: bool) -> dict[str, set[str]]:
    """Returns the modules that each module imports; `types`: including those for types."""
    found = modules(package)
    return {
        module: {
            target if target in found else target.rpartition(".")[0]
            for _, target, for_types in targets
            if types or not for_types
        }
        & found.keys() - {module}
        for module, targets in found.items()
    }


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Returns the groups of nodes in which each node leads to all the others."""
    reached: dict[str, set[str]] = {}
    for node in arrows:
        seen, waiting = set(), [node]
        while waiting:
            new = arrows[waiting.pop()] - seen
            seen |= new
            waiting += new
        reached[node] = seen
    groups = {
        tuple(sorted(other for other in seen if node in reached[other]))
        for node, seen in reached.items()
        if node in seen
    }
    return sorted(map(list, groups))


def levels(arrows: dict[str, set[str]]) -> int:
    """Returns the length of the longest chain; a cycle counts as one."""
    together = {node: group[0] for group in circles(arrows) for node in group}
    below: dict[str, set[str]] = {}
    for node, there in arrows.items():
        own = together.get(node, node)
        below.setdefault(own, set()).update(together.get(other, other) for other in there)

    @functools.cache
    def level(node: str) -> int:
        return 1 + max((level(other) for other in below[node] - {node}), default=0)

    return max(map(level, below))


def drawing(package: Path) -> list[str]:
    """Describes the imports between packages, followed by each cycle on its own line."""
    packages: dict[str, set[str]] = {}

    def room(module: str) -> str:
        is_package = (package / Path(*module.split("."))).is_dir()
        return module if is_package else module.rpartition(".")[0] or module

    for module, there in graph(package, types=False).items():
        packages.setdefault(room(module), set()).update(map(room, there))
    packages = {name: there - {name} for name, there in packages.items()}
    arrows = sum(map(len, packages.values()))
    lines = [f"{len(packages)} packages, {arrows} arrows, {levels(packages)} levels"]
    lines += [f"circle of packages: {', '.join(group)}" for group in circles(packages)]
    groups = circles(graph(package, types=True))
    return lines + [f"circle of modules: {', '.join(group)}" for group in groups]


def main() -> None:
    """Prints the imports that go up, and the cycles; fails if there are any."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    count, found = violations(root)
    print("\n".join(found) if found else f"{count} modules, no import goes up")
    packages, *running_round = drawing(root / "jsparse")
    print(packages, *running_round, sep="\n")
    raise SystemExit(bool(found or running_round))


if __name__ == "__main__":
    main()
