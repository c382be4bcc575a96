"""Files and folders that appear whole or not at all."""

import os
import secrets
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Generator[Path, None, None]:
    """A path beside `path` to write to; at the end of the block what is there becomes `path`, in one move.

    Whatever fails, in the block or after it, leaves `path` as it was and nothing beside it. The data is on the disk
    before the move, so a crash of the machine leaves the old file or the new one.

    Raises:
        OSError: the file cannot be written; anything that the block raises.
    """
    beside = path.with_name(f".calotype-{secrets.token_hex(6)}.part")
    try:
        yield beside
        with beside.open("r+b") as stream:
            os.fsync(stream.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Generator[Path, None, None]:
    """A folder beside `path` to fill; at the end of the block it becomes `path`, which is new or an empty folder, in
    one move. Folders above it are made if need be.

    Whatever fails, in the block or after it, leaves `path` as it was, and nothing else.

    Raises:
        OSError: the folder cannot be made, or holds something by now; anything that the block raises.
    """
    beside = path.with_name(f".calotype-{secrets.token_hex(6)}.part")
    made = [each for each in path.parents if not each.exists()]
    try:
        beside.mkdir(parents=True)
        yield beside
        os.replace(beside, path)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        for each in made:
            with suppress(OSError):
                each.rmdir()
        raise
