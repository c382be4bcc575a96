"""Folders in diffusers' layout: what they hold."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..core.json_file import json_object
from ..language.checkpoints import StoredModel

INDEX, CONFIG, SCHEDULER_CONFIG = "model_index.json", "config.json", "scheduler_config.json"
NAME = "_name_or_path"
"""The entry of the first two that says where a model, or a part, came from."""
_LENGTH_BYTES = 8
_SAMPLES, _SAMPLE_BYTES = 64, 4096


def is_diffusers(path: Path) -> bool:
    """Whether it is a folder in diffusers' layout."""
    return (path / INDEX).is_file()


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


def check_entries(wanted: Iterable[tuple[object, str, object]]) -> None:
    """Makes sure that parts belong together, by an entry of each one's config and what the denoiser needs there.
    Autoencoders in files, and parts that are loaded already, have none to look at.

    Raises:
        ValueError: another value. FileNotFoundError: no config.json.
    """
    for part, entry, value in wanted:
        entries = config_of(part)
        if entries is not None and entries.get(entry) != value:
            raise ValueError(f"{part} has {entry} {entries.get(entry)}; the transformer needs {value}")


def config_of(part: object) -> Mapping[str, Any] | None:
    """The entries of a part's config.json, if it is a folder, or those of a text encoder in a file.

    Raises:
        FileNotFoundError, ValueError: it has none, or a damaged one.
    """
    if isinstance(part, StoredModel):
        return part.entries
    return entries_of(part / CONFIG) if isinstance(part, Path) and part.is_dir() else None


def weights_digests(components: Mapping[str, Iterable[Path]]) -> dict[str, str]:
    """The sha256 of each weights file's size, header and samples, by its component's name and its own: reading all the
    gigabytes would take longer than loading them."""
    return {f"{name}/{path.name}": _digest(path) for name, files in components.items() for path in sorted(files)}


def _digest(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(_LENGTH_BYTES)
        digest = hashlib.sha256(size.to_bytes(_LENGTH_BYTES, "little") + start)
        header = int.from_bytes(start, "little")  # of safetensors; other formats do not begin with it
        digest.update(stream.read(header if header < size else _SAMPLE_BYTES))
        for n in range(_SAMPLES):
            stream.seek(n * max(size - _SAMPLE_BYTES, 0) // (_SAMPLES - 1))
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
