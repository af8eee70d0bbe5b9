"""Options shared by all scripts."""

from argparse import ArgumentParser
from pathlib import Path


def report_parser(script: str, description: str, *, required: bool = False) -> ArgumentParser:
    """Returns a parser with the options of every script that records a run.

    Args:
        script: the name of the module in bench.
        description: of the script, for --help.
        required: whether --json must be given.
    """
    parser = recording_parser(script, description)
    parser.add_argument(
        "--json", type=Path, metavar="PATH", required=required, help="write the report here"
    )
    return parser


def recording_parser(script: str, description: str) -> ArgumentParser:
    """Returns the same parser without --json, for a script with another kind of output."""
    parser = ArgumentParser(prog=f"python -m bench.{script}", description=description)
    parser.add_argument(
        "--allow-modified",
        action="store_true",
        help='measure a modified working tree too; the record then says "modified": true',
    )
    return parser
