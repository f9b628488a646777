"""Entry point of `python -m loraplex`, also from a source tree."""

import sys

from loraplex.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
