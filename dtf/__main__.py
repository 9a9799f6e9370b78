"""The door to the command line: `python -m dtf` and `dtf`. See `dtf.cli.main`.

A signal to stop is answered before anything slow is imported.
"""

import sys

from dtf.host import starting


def main() -> int:
    """Do what the command line of this process says; returns the exit code."""
    starting.listen()
    from dtf.cli.main import main

    try:
        return main()
    finally:
        starting.ignore()


if __name__ == "__main__":
    sys.exit(main())
