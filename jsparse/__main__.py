"""Runs the command `jsparse`, also as `python -m jsparse`."""

import sys

from jsparse.runtime.interrupts import lose_no_interrupts


def main() -> None:
    """Runs the command; from here on an interrupt ends it, even during imports."""
    lose_no_interrupts()
    try:
        from jsparse.cli.app import main as run

        run()
    except KeyboardInterrupt:  # while the commands are set up, which takes 0.2 s
        sys.exit(130)


if __name__ == "__main__":
    main()
