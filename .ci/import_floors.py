"""Check that no module imports from a floor above its own; prints the imports that do.

Usage: python .ci/import_floors.py [ROOT]
"""

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# what each floor holds, from the ground up; a module belongs to the longest prefix of its name
FLOORS = (
    ("vocabulary", "memory", "deprecated", "shapes", "threshold", "partials", "selection", "cache"),
    ("kernels", "pallas_kernels"),
    ("contract", "policy"),
    ("policies", "policies", "extend"),
    ("models", "models"),
    ("runtime", "runtime", "prompts", "text_stream", "host_reader", "generation"),
    ("above runtime", "evaluation", "train", "channel_calibration", "model_info"),
    ("cli", "cli", "__main__"),
)
# models stand apart: of what is below they use this one module, which knows nothing of caches
FOR_MODELS = "memory"
# packages of one floor that do not know each other
BESIDE = {"evaluation", "train"}


def floor(module: str) -> tuple[int, str]:
    """Return the number and name of a module's floor; `module` lacks the leading `jsparse.`."""
    for number, (name, *prefixes) in enumerate(FLOORS):
        if module.split(".")[0] in prefixes:
            return number, name
    raise SystemExit(f"jsparse.{module} belongs to no floor: add it to FLOORS in {__file__}")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and target of every import of jsparse, below `jsparse.`; those for types alone do
    not count.
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
        if isinstance(node, ast.ImportFrom) and node.module == "jsparse":
            yield from (
                (node.lineno, alias.name) for alias in node.names if alias.name != "__version__"
            )
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("jsparse."):
            yield node.lineno, str(node.module).removeprefix("jsparse.")
        elif isinstance(node, ast.Import):
            yield from (
                (node.lineno, alias.name.removeprefix("jsparse."))
                for alias in node.names
                if alias.name.startswith("jsparse.")
            )


def violations(root: Path) -> tuple[int, list[str]]:
    """Return the number of modules below `root`/jsparse and a line for every import that goes up or
    across.
    """
    package, found = root / "jsparse", []
    walked = os.walk(package, followlinks=True)
    files = sorted(Path(folder, name) for folder, _, names in walked for name in names)
    files = [file for file in files if file.suffix == ".py" and file != package / "__init__.py"]
    for file in files:
        module = ".".join(file.relative_to(package).with_suffix("").parts).removesuffix(".__init__")
        number, name = floor(module)
        for line, target in imports(file):
            above, there = floor(target)
            apart = name == "models" and there != name and target != FOR_MODELS
            across = {module.split(".")[0], target.split(".")[0]} == BESIDE
            if above > number or apart or across:
                found.append(
                    f"{file.relative_to(root)}:{line}: {name} imports {there} (jsparse.{target})"
                )
    return len(files), found


def main() -> None:
    """Print the imports that go up and fail if there are any."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    count, found = violations(root)
    print("\n".join(found) if found else f"{count} modules, no import goes up")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
