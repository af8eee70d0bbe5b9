"""`python -m jsparse`, the same as the command `jsparse`."""

from jsparse.cli.app import main

main()
