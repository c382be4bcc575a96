"""Names of files that belong together: fox.png as fox-1.png, fox-2.png, ..."""

import itertools
from pathlib import Path

MOST_DIGITS = 7


def numbered(path: Path, count: int) -> tuple[Path, ...]:
    """`path` itself for one file; for several fox-1.png, fox-2.png, ..., padded to equal width so that they sort."""
    if count == 1:
        return (path,)
    digits = len(str(count))
    return tuple(_name(path, n, digits) for n in range(1, count + 1))


def first_file(path: Path) -> Path:
    """`path`, or, where no such file is, the first of the files numbered after it: of several sequences with numbers of
    different widths the one that was written last."""
    firsts = [_name(path, 1, digits) for digits in range(1, MOST_DIGITS + 1)]
    found = [] if path.exists() else [first for first in firsts if first.is_file()]
    return max(found, key=lambda first: first.stat().st_mtime_ns) if found else path


def files_after(first: Path, path: Path) -> tuple[Path, ...]:
    """The `first_file` of `path`, and all whose numbers, of its width, follow without a gap."""
    digits = len(first.stem) - len(path.stem) - 1
    names = (_name(path, n, digits) for n in itertools.count(1))
    return tuple(itertools.takewhile(Path.is_file, names))


def _name(path: Path, n: int, digits: int) -> Path:
    return path.with_name(f"{path.stem}-{n:0{digits}d}{path.suffix}")
