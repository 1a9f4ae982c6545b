"""`python -m sumgrad` is the `sumgrad` command."""

import sys

from sumgrad.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
