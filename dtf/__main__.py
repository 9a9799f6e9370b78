"""The door to the command line: `python -m dtf`. See `dtf.cli.main`."""

import sys

from dtf.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
