"""What several commands share: the parser, messages, types of arguments, names of files."""

import argparse
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

Commands = argparse._SubParsersAction  # pyright: ignore[reportPrivateUsage]
MAX_SLUG = 60
MAX_THREADS = 1024
BUNDLED_HELP = "what to load (default: the bundled model; see calotype models)"


class Parser(argparse.ArgumentParser):
    """argparse, with mistakes as `ValueError` instead of a page of usage."""

    def error(self, message: str) -> NoReturn:
        """Raises ValueError."""
        raise ValueError(f"{message} (see {self.prog} --help)")


def complain(message: str) -> None:
    """One line on stderr, whatever the message holds."""
    print(f"calotype: {' '.join(message.split())}", file=sys.stderr)


def warn(message: str) -> None:
    """One warning on stderr."""
    complain(f"warning: {message}")


def size(text: str) -> tuple[int, int]:
    """ "128" or "128x160" as (width, height) in pixels."""
    found = re.fullmatch(r"(\d+)(?:[xX*](\d+))?", text.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: expected pixels as 128, or WIDTHxHEIGHT as 128x160")
    return int(found[1]), int(found[2] or found[1])


def count(text: str) -> int:
    """A whole number from 1 up."""
    if not re.fullmatch(r"\d+", text.strip()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def words(parts: list[str], what: str = "prompt") -> str:
    """The words of a prompt joined; they need no quotes in the shell."""
    joined = " ".join(parts).strip()
    if not joined:
        raise ValueError(f"the {what} is empty: say in a few words what you want, as in: a fox on a beach")
    if not joined.isprintable() and "\udc80" <= max(joined) <= "\udcff":
        raise ValueError(f"the {what} is not valid text in this terminal's encoding: {joined!a}")
    return joined


def free_names(folder: Path, prompt: str, number: int, suffix: str = ".png") -> tuple[Path, ...]:
    """The first `number` names made of the prompt that are not taken: a-fox.png, a-fox-2.png, a-fox-3.png, ..."""
    free = (path for path in _names(folder, prompt, suffix) if not path.exists())
    return tuple(itertools.islice(free, number))


def free_name(folder: Path, prompt: str, number: int, suffix: str) -> Path:
    """The first name made of the prompt after which `number` files can be numbered that are not there yet."""
    from ..pipelines.frame_names import numbered

    names = _names(folder, prompt, suffix)
    return next(path for path in names if not any(each.exists() for each in numbered(path, number)))


def _names(folder: Path, prompt: str, suffix: str) -> Iterator[Path]:
    slug = re.sub(r"[\W_]+", "-", prompt.lower()).strip("-")[:MAX_SLUG].rstrip("-") or "image"
    yield folder / f"{slug}{suffix}"
    for n in itertools.count(2):
        yield folder / f"{slug}-{n}{suffix}"


def add_model_options(parser: argparse.ArgumentParser, source: str = BUNDLED_HELP) -> None:
    """--model, whose help is `source`, --device, --dtype, --threads."""
    parser.add_argument("--model", metavar="SOURCE", help=source)
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: what the model runs best on)")
    parser.add_argument("--dtype", help="float32, bfloat16, ... (default: the model's own for the device)")
    add_threads_option(parser)


def add_threads_option(parser: argparse.ArgumentParser) -> None:
    """--threads."""
    parser.add_argument("--threads", type=count, help="CPU threads (default: torch's choice)")


def use_threads(threads: int | None) -> None:
    """Lets torch compute on this many CPU threads."""
    if threads is not None:
        if threads > MAX_THREADS:
            raise ValueError(f"threads is {threads}; it must be from 1 to {MAX_THREADS}")
        import torch

        torch.set_num_threads(threads)
