"""The command line: `calotype image | video | text | chat | replay | inspect | models | diff | doctor`.

A mistake of the user's is one line on stderr and exit code 2; an interruption one line and 130. Nothing here imports
torch before a command runs.
"""

import argparse
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from . import chat, diff, doctor, image, inspect, models, replay, text, video
from .common import Parser, complain

COMMANDS = (image, video, text, chat, replay, inspect, models, diff, doctor)
USER_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141
_OUT_OF_MEMORY = re.compile(r"can't allocate memory|out of memory", re.IGNORECASE)  # torch's, of CPUs and of GPUs


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line (default: this process's) and returns its exit code."""
    sys.stdout, sys.stderr = (stream or _nowhere() for stream in (sys.stdout, sys.stderr))
    sys.stdin = sys.stdin or io.StringIO()
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return BROKEN_PIPE
    except OSError as error:
        complain(f"error: {_os_error(error)}")
        return USER_ERROR
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not _OUT_OF_MEMORY.search(str(error)):
            raise
        complain("error: there is not enough memory for this: try a smaller size, fewer frames or a smaller --count")
        return USER_ERROR
    except (ValueError, ImportError, ArithmeticError) as error:
        complain(f"error: {error}")
        return USER_ERROR


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command; each leaves its function under `run`."""
    parser = Parser(
        prog="calotype", description="Words to pictures, clips and text, on this machine.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    return parser


def _run(arguments: Sequence[str] | None) -> int:
    try:
        options = build_parser().parse_args(arguments)
        run: Callable[[argparse.Namespace], int] = options.run
        code = run(options)
    except SystemExit as stop:  # --help, --version
        code = int(stop.code or 0)
    try:
        sys.stdout.flush()
    except OSError:
        _drop_output()
        raise
    return code


def _version() -> str:
    from .._version import __version__

    return f"calotype {__version__}"


def _os_error(error: OSError) -> str:
    if error.strerror is None:
        return str(error)
    return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"


def _nowhere() -> TextIO:
    """What stands for a stream that was closed before the start."""
    return open(os.devnull, "w", encoding="utf-8")


def _drop_output() -> None:
    """Points stdout at nothing, so that Python does not fail once more when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
