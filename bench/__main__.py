"""Lists the committed results and reruns their commands."""

import shlex
import subprocess
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option, Typer, echo

from bench.lib.environment import REPOSITORY
from bench.lib.tables import find, tables

app = Typer(no_args_is_help=True, add_completion=False, help="The benchmarks behind the figures.")


@app.command("list")
def list_() -> None:
    """Prints each committed result: name, machine, script and content."""
    for table in tables().values():
        echo(f"{table.name:28}{table.machine:6}{table.script or '(no script)'}")
        echo(f"    {table.shows}")


@app.command()
def reproduce(
    name: Annotated[str, Argument(help="A name from `python -m bench list`.")],
    more: Annotated[
        list[str] | None, Argument(help="Further arguments for the script, after --.")
    ] = None,
    out: Annotated[
        Path | None,
        Option(help="Path of the report. The default is in build/bench, not in bench/results."),
    ] = None,
) -> None:
    """Measures a committed result again, on this machine.

    Example: python -m bench reproduce cpu_generate -- --hf-python hfenv/bin/python
    """
    try:
        table = find(name)
        path = _within(out.resolve()) if out else table.build
        commands = table.commands(path, more or ())
    except ValueError as error:
        echo(f"error: {error}", err=True)
        raise Exit(1) from None
    if table.note:
        echo(f"note: {table.note}", err=True)
    (REPOSITORY / path).parent.mkdir(parents=True, exist_ok=True)
    for command in commands:
        echo(f"+ {shlex.join(['python', *command[1:]])}", err=True)
        code = subprocess.run(command, cwd=REPOSITORY, check=False).returncode
        if code:
            raise Exit(code)


def _within(path: Path) -> Path:
    """Returns a path relative to the repository if it is within it."""
    return path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path


if __name__ == "__main__":
    app(prog_name="python -m bench")
