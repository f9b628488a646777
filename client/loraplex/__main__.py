"""`python -m loraplex`: the command, also where nothing is installed and only the source folders are on the path."""

import sys

from loraplex.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
