"""Check that no module imports from a floor above its own; prints the imports that do.

Usage: python .ci/import_floors.py [ROOT]
"""

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# What each floor holds, from the ground up: rooms and modules below jsparse.
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
    ("runtime", "runtime", "text", "generation", "conversation"),
    ("above runtime", "evaluation", "train", "engine"),
    ("server and benchmark", "server", "benchmark"),
    ("cli", "cli", "__main__"),
)
# models stand apart: of what is below they use these modules, which know nothing of caches
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
    "pallas_kernels.gated_product",
    "pallas_kernels.linear",
    "pallas_kernels.norm_product",
    "pallas_kernels.quantized_product",
    "pallas_kernels.residual_norm",
}
# packages of one floor that do not know each other
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


def imports(path: Path, public: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Yields line and target, below `jsparse.`, of every import; those for types do not count.

    What is read off a plain `import jsparse` counts as imported from where it is.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing:
            continue
        if isinstance(node, ast.ImportFrom) and node.level:
            raise SystemExit(f"{path}:{node.lineno}: a relative import hides its floor")
        if isinstance(node, ast.ImportFrom) and node.module == "jsparse":
            names = (alias.name for alias in node.names if alias.name != "__version__")
            yield from ((node.lineno, public.get(name, name)) for name in names)
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("jsparse."):
            # what is imported may be a module, which may stand on another floor than its room
            module = str(node.module).removeprefix("jsparse.")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            found = (alias.name for alias in node.names if alias.name.startswith("jsparse."))
            yield from ((node.lineno, name.removeprefix("jsparse.")) for name in found)
        elif (
            isinstance(node, ast.Attribute)
            and node.attr in public
            and ast.unparse(node) == f"jsparse.{node.attr}"
        ):
            yield node.lineno, public[node.attr]


def violations(root: Path) -> tuple[int, list[str]]:
    """Returns the number of modules in `root`/jsparse and a line per import up or across."""
    package, found = root / "jsparse", []
    walked = os.walk(package, followlinks=True)
    files = sorted(Path(folder, name) for folder, _, names in walked for name in names)
    files = [file for file in files if file.suffix == ".py" and file != package / "__init__.py"]
    public = public_names(package)
    for file in files:
        module = ".".join(file.relative_to(package).with_suffix("").parts).removesuffix(".__init__")
        number, name = floor(module)
        for line, target in imports(file, public):
            above, there = floor(target)
            own = any(f"{target}.".startswith(f"{module}.") for module in FOR_MODELS)
            apart = name == "models" and there != name and not own
            pair = {module.split(".")[0], target.split(".")[0]}
            across = len(pair) == 2 and pair <= BESIDE
            if above > number or apart or across:
                found.append(
                    f"{file.relative_to(root)}:{line}: {name} imports {there} (jsparse.{target})"
                )
    return len(files), found


def main() -> None:
    """Prints the imports that go up and fail if there are any."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    count, found = violations(root)
    print("\n".join(found) if found else f"{count} modules, no import goes up")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
