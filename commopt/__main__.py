"""``python -m commopt`` is ``commopt``."""

import sys

from commopt.cli import main

if __name__ == "__main__":
    sys.exit(main())
