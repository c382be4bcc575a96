"""`python -m calotype`, and what the `calotype` command runs."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
