"""The command `jsparse`: generate, chat, serve, inspect, eval, compare, bench and others.

jax and modules that depend on it are imported inside the commands, so that `--help` and errors in
options appear at once.
"""

import os
import traceback
from typing import Annotated, Any

import typer
from typer import Option

from jsparse.cli.bench import bench
from jsparse.cli.calibrate import calibrate_channels, calibrate_heads
from jsparse.cli.chat import chat
from jsparse.cli.check_policy import check_policy
from jsparse.cli.compare import compare
from jsparse.cli.console import print_error, quiet_jax, write_any_text
from jsparse.cli.evaluate import evaluate
from jsparse.cli.generate import generate
from jsparse.cli.info import info, policies
from jsparse.cli.inspect import inspect
from jsparse.cli.options import Command, CommandGroup
from jsparse.cli.recommend import recommend
from jsparse.cli.serve import serve
from jsparse.cli.train_gates import train_gates
from jsparse.cli.train_indexer import train_indexer


class _Commands(CommandGroup):
    """A command group that prints the library's errors, and jax's of a platform, as one line.

    They go to standard error. Other exceptions keep their traceback.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except BrokenPipeError:  # typer then exits quietly
            raise
        except (ValueError, OSError, FloatingPointError) as error:
            print_error(error)
            raise typer.Exit(2) from None
        except (RuntimeError, AssertionError) as error:
            if not _lacks_platform(error):
                raise
            named, reason = os.environ.get("JAX_PLATFORMS", ""), f": {error}" if str(error) else ""
            print_error(f"JAX_PLATFORMS={named!r}: must be platforms that JAX finds here{reason}")
            raise typer.Exit(2) from None


def _lacks_platform(error: BaseException) -> bool:
    """Returns whether jax raised the error while initialising its devices."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(
        frame.f_globals.get("__name__") == "jax._src.xla_bridge"
        and frame.f_code.co_name == "backends"
        for frame in frames
    )


app = typer.Typer(cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False)


def main() -> None:
    """Runs the command `jsparse`."""
    quiet_jax()
    write_any_text()
    app(prog_name="jsparse")


def _print_version(wanted: bool) -> None:
    if wanted:
        from jsparse import __version__

        print(f"jsparse {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Decode long contexts with sparse attention, for Llama and Qwen models."""


for _name, _command in {
    "generate": generate,
    "chat": chat,
    "serve": serve,
    "info": info,
    "policies": policies,
    "check-policy": check_policy,
    "recommend": recommend,
    "inspect": inspect,
    "eval": evaluate,
    "compare": compare,
    "train-gates": train_gates,
    "train-indexer": train_indexer,
    "calibrate-channels": calibrate_channels,
    "calibrate-heads": calibrate_heads,
}.items():
    app.command(_name, cls=Command)(_command)

app.add_typer(bench, name="bench")
