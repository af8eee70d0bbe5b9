"""Defines the options that all scripts share."""

from argparse import ArgumentParser
from pathlib import Path


def report_parser(script: str, description: str, *, required: bool = False) -> ArgumentParser:
    """Returns a parser with the options of every script that records a run.

    Args:
        script: the name of the module in bench.
        description: of the script, for --help.
        required: --json must be given.
    """
    parser = recording_parser(script, description)
    parser.add_argument(
        "--json", type=Path, metavar="PATH", required=required, help="write the report here"
    )
    return parser


def recording_parser(script: str, description: str) -> ArgumentParser:
    """Returns such a parser without --json, for a script that writes something else."""
    parser = ArgumentParser(prog=f"python -m bench.{script}", description=description)
    parser.add_argument(
        "--allow-modified",
        action="store_true",
        help='measure a modified working tree too; the record then says "modified": true',
    )
    return parser
