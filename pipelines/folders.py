"""Folders in diffusers' layout: what they hold."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.json_file import json_object

INDEX = "model_index.json"
_LENGTH_BYTES = 8
_SAMPLES, _SAMPLE_BYTES = 64, 4096


def pipeline_class(folder: Path) -> str:
    """The class of pipeline that a folder was saved from.

    Raises:
        ValueError: its model_index.json is damaged, or names none.
    """
    name = entries_of(folder / INDEX).get("_class_name")
    if not isinstance(name, str):
        raise ValueError(f"{folder / INDEX} names no pipeline: _class_name is {name!r}")
    return name


def component(folder: Path, name: str) -> Path:
    """The folder of one component.

    Raises:
        FileNotFoundError: it is missing.
    """
    path = folder / name
    if not path.is_dir():
        raise FileNotFoundError(f"{folder} has no folder {name!r}, a part that this kind of model needs")
    return path


def entries_of(path: Path) -> Mapping[str, Any]:
    """The entries of a JSON file.

    Raises:
        FileNotFoundError: no such file. ValueError: not a JSON object.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    return json_object(path)


def weights_digests(folder: Path) -> dict[str, str]:
    """The sha256 of each weights file's size, header and samples, by its path in the folder: reading all the gigabytes
    would take longer than loading them."""
    return {path.relative_to(folder).as_posix(): _digest(path) for path in sorted(folder.rglob("*.safetensors"))}


def _digest(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(_LENGTH_BYTES)
        digest = hashlib.sha256(size.to_bytes(_LENGTH_BYTES, "little") + start)
        digest.update(stream.read(min(int.from_bytes(start, "little"), size)))
        for n in range(_SAMPLES):
            stream.seek(n * max(size - _SAMPLE_BYTES, 0) // (_SAMPLES - 1))
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
