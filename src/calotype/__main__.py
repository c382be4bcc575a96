"""`python -m calotype`, and what the `calotype` command runs."""

import contextlib
import gc
import os
import sys
from typing import NoReturn

from . import cli

_COLLECT_EVERY = 200_000  # new objects; at Python's 700, importing torch takes half a second longer


def main() -> NoReturn:
    """Runs the command line and ends the process at once: taking torch's modules apart would take another second."""
    gc.set_threshold(_COLLECT_EVERY)
    code = cli.main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
