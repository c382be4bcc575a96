"""The files of the bundled model, looked at without torch."""

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

WEIGHTS = ("denoiser.safetensors", "vae.safetensors", "language.safetensors")
OTHERS = ("tokenizer.json", "config.json")
LENGTH_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class WeightFile:
    """One safetensors file: its size in bytes, numbers in it, and their types."""

    path: Path
    num_bytes: int
    num_parameters: int
    dtypes: tuple[str, ...]


def assets() -> Path:
    """The folder of the bundled model."""
    from .. import plate

    return Path(plate.__path__[0]) / "assets"


def read_config(folder: Path) -> dict[str, Any]:
    """config.json.

    Raises:
        FileNotFoundError: it is not there. ValueError: it is not JSON.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        return cast(dict[str, Any], json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None


def inspect(path: Path) -> WeightFile:
    """Reads a safetensors header, and checks that the file is as long as it says.

    Raises:
        FileNotFoundError: it is not there. ValueError: it is not such a file, or not a whole one.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(LENGTH_BYTES)
        length = struct.unpack("<Q", start)[0] if len(start) == LENGTH_BYTES else num_bytes
        header = file.read(length) if length < num_bytes else b""
    try:
        tensors = cast(dict[str, dict[str, Any]], json.loads(header))
        tensors.pop("__metadata__", None)
        end = max(entry["data_offsets"][1] for entry in tensors.values())
        num_parameters = sum(_product(entry["shape"]) for entry in tensors.values())
        dtypes = tuple(sorted({str(entry["dtype"]) for entry in tensors.values()}))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path}: damaged, not a safetensors file") from None
    if LENGTH_BYTES + length + end != num_bytes:
        raise ValueError(f"{path}: damaged, {num_bytes} bytes instead of {LENGTH_BYTES + length + end}")
    return WeightFile(path=path, num_bytes=num_bytes, num_parameters=num_parameters, dtypes=dtypes)


def check_digest(path: Path, expected: Mapping[str, str]) -> str:
    """Says in words whether a file's sha256 is the one expected for its name.

    Raises:
        ValueError: it is another one.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    wanted = expected.get(path.name)
    if wanted is None:
        return f"sha256 {digest[:12]}... (none on record to compare with)"
    if digest != wanted:
        raise ValueError(f"{path}: damaged, sha256 {digest[:12]}... instead of {wanted[:12]}...")
    return f"sha256 {digest[:12]}... as on record"


def _product(shape: list[int]) -> int:
    product = 1
    for side in shape:
        product *= side
    return product
