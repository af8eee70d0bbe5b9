"""Runs the command `jsparse` as `python -m jsparse`."""

from jsparse.cli.app import main

main()
