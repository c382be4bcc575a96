"""Weights files on disk: which files a name stands for, what they hold, and whether they are what they claim to be.

Safetensors and GGUF (by the name's ending) make one list of tensors. Only headers and sizes are read here, so a wrong
file is refused before anything is allocated.
"""

import functools
import hashlib
import json
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch

from .float8 import with_factors
from .gguf_file import GGUFFile
from .stored_tensor import StoredTensor


@dataclass(frozen=True)
class Within:
    """One part of a checkpoint that holds several: the tensors of `files` whose names begin with `prefix`, by their
    names without it."""

    files: "Files"
    prefix: str


Files: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Within

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Storage formats by their name in a safetensors header."""

_MAX_HEADER_BYTES = 100_000_000
_KEPT_HEADERS = 64
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.(?P<kind>safetensors|gguf)")
_PICKLED = "pickled weights are never loaded, convert them to safetensors"
_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "is a git-lfs pointer, not the file it points to; fetch it with `git lfs pull`"),
    (b"PK\x03\x04", f"is a zip archive, as torch.save writes; {_PICKLED}"),
    (b"\x80\x02", f"is a Python pickle; {_PICKLED}"),
    (b"\x80\x03", f"is a Python pickle; {_PICKLED}"),
    (b"\x80\x04", f"is a Python pickle; {_PICKLED}"),
    (b"\x80\x05", f"is a Python pickle; {_PICKLED}"),
    (b"GGUF", "is a GGUF file; its name must end in .gguf"),
    (b"\x89HDF", "is an HDF5 file"),
    (b"\x89PNG", "is a PNG picture"),
    (b"\xff\xd8\xff", "is a JPEG picture"),
    (b"\x1f\x8b", "is a gzip archive"),
    (b"<", "is a web page or XML, perhaps the error page of a failed download"),
    (b"{", "is JSON text"),
)


@dataclass(frozen=True, kw_only=True)
class Header:
    """What one safetensors file holds."""

    file: Path
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]


def read_checkpoint(files: Files) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint by name, from the headers alone; factors of float8 weights are with their weights.

    `files` is a safetensors or `.gguf` file, an index (`*.safetensors.index.json`), a folder that holds safetensors or
    an index, several of these, or a part of them. Raises FileNotFoundError for a missing file or shard; ValueError for
    a file that is not whole, a format that cannot be read, a tensor that an index promises but no shard holds, or a
    name that occurs twice.
    """
    if isinstance(files, Within):
        whole, prefix = read_checkpoint(files.files), files.prefix
        return {name.removeprefix(prefix): tensor for name, tensor in whole.items() if name.startswith(prefix)}
    tensors: dict[str, StoredTensor] = {}
    for file in resolve_files(files):
        for name, tensor in _tensors(file).items():
            if name in tensors:
                raise ValueError(f"{file} and {tensors[name].file} both hold a tensor {name!r}")
            tensors[name] = tensor
    for index in _indices(files):
        absent = sorted(set(_weight_map(index)) - set(tensors))
        if absent:
            raise ValueError(f"{index} lists {len(absent)} tensors that no shard holds: {', '.join(absent[:3])}")
    return with_factors(tensors)


def part_of(files: Files, prefixes: Sequence[str]) -> Files:
    """The part whose names begin with the first of `prefixes` that any name has; all of the files where none has one.
    Errors as for `read_checkpoint`."""
    names = read_checkpoint(files)
    prefix = next((each for each in prefixes if any(name.startswith(each) for name in names)), None)
    return files if prefix is None else Within(files, prefix)


def resolve_files(files: Files) -> tuple[Path, ...]:
    """The safetensors files that `files` (see `read_checkpoint`) stands for, each once, all existing."""
    found: dict[Path, None] = {}
    for path in _paths(files):
        path = _in_folder(path) if path.is_dir() else path
        for file in _shards(path) if path.suffix == ".json" else (path,):
            if not file.is_file():
                raise FileNotFoundError(f"no weights file {file}")
            found[file] = None
    if not found:
        raise ValueError("no weights files were given")
    _check_shard_numbers(tuple(found))
    return tuple(found)


def shards_of(path: Path) -> tuple[Path, ...]:
    """All files of the model of which `path` is one, by its name: `x-00001-of-00003.safetensors` is one of three. They
    need not exist."""
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return (path,)
    stem, total, kind = match["stem"], match["total"], match["kind"]
    numbers = range(1, int(total) + 1)
    return tuple(path.with_name(f"{stem}-{number:05d}-of-{total}.{kind}") for number in numbers) or (path,)


def read_header(file: str | os.PathLike[str]) -> Header:
    """What a safetensors file holds. Raises FileNotFoundError, or ValueError that says what the file looks like."""
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"no weights file {path}")
    size = path.stat().st_size
    try:
        with path.open("rb") as stream:
            start = stream.read(64)
            length = _header_length(path, start, size)
            stream.seek(8)
            text = stream.read(length)
    except PermissionError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    return _parse_header(path, text, size - 8 - length)


def file_digest(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file, 64 hexadecimal digits."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file {Path(path)}")
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _tensors(file: Path) -> Mapping[str, StoredTensor]:
    if file.suffix.lower() != ".gguf" or not file.is_file():
        return read_header(file).tensors
    found = file.stat()
    return _gguf_tensors(file, found.st_ino, found.st_size, found.st_mtime_ns)


@functools.lru_cache(maxsize=_KEPT_HEADERS)
def _gguf_tensors(file: Path, number: int, size: int, changed: int) -> Mapping[str, StoredTensor]:
    """Once for each state of the file, whose number, size and time change with it: a vocabulary may be in there."""
    return GGUFFile(file).tensors


def _header_length(path: Path, start: bytes, size: int) -> int:
    if size == 0:
        raise ValueError(f"{path} is not a safetensors file: it is empty (0 bytes)")
    if size >= 10 and start[8:9] == b"{":
        (length,) = struct.unpack("<Q", start[:8])
        if length <= min(_MAX_HEADER_BYTES, size - 8):
            return length
        if length <= _MAX_HEADER_BYTES:
            raise ValueError(f"{path} is truncated: its header alone takes {8 + length} bytes, the file has {size}")
    raise ValueError(f"{path} is not a safetensors file: it {_looks_like(start)}")


def _looks_like(start: bytes) -> str:
    for signature, description in _SIGNATURES:
        if start.lstrip().startswith(signature):
            return description
    if start.isascii() and start.decode("ascii").isprintable():
        return "is text"
    return f"begins with the bytes {start[:8].hex(' ')}"


@functools.lru_cache(maxsize=_KEPT_HEADERS)
def _parse_header(path: Path, text: bytes, data_bytes: int) -> Header:
    """Once for each text: loading a model asks for the same headers several times."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a safetensors file: its header is corrupted") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a safetensors file: its header is corrupted")
    entries = cast(dict[str, Any], found)
    metadata: dict[str, str] = entries.pop("__metadata__", None) or {}
    tensors = {name: _parse_entry(path, name, entry) for name, entry in entries.items()}
    if not tensors:
        raise ValueError(f"{path} holds no tensors")
    position = 0
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.stop)):
        if tensor.start != position:
            raise ValueError(f"{path} is corrupted: tensor {tensor.name!r} begins at {tensor.start}, not {position}")
        position = tensor.stop
    if position > data_bytes:
        raise ValueError(f"{path} is truncated: it holds {data_bytes} of the {position} bytes of its tensors")
    if position < data_bytes:
        raise ValueError(f"{path} is corrupted: {data_bytes - position} bytes after its last tensor")
    return Header(file=path, tensors=tensors, metadata=metadata)


def _parse_entry(path: Path, name: str, entry: Any) -> StoredTensor:
    try:
        code, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        start, stop = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path} is corrupted: the header's entry for tensor {name!r} makes no sense") from error
    if code not in DTYPES:
        raise ValueError(f"{path}: tensor {name!r} is stored as {code}; supported are {', '.join(DTYPES)}")
    dtype = DTYPES[code]
    if min(shape, default=0) < 0 or stop - start != prod(shape) * dtype.itemsize:
        raise ValueError(f"{path} is corrupted: tensor {name!r} {list(shape)} {code} cannot take {stop - start} bytes")
    return StoredTensor(name=name, file=path, dtype=dtype, shape=shape, start=start, stop=stop)


def _paths(files: Files) -> tuple[Path, ...]:
    if isinstance(files, Within):
        return _paths(files.files)
    return (Path(files),) if isinstance(files, str | os.PathLike) else tuple(Path(file) for file in files)


def _indices(files: Files) -> tuple[Path, ...]:
    paths = (_in_folder(path) if path.is_dir() else path for path in _paths(files))
    return tuple(path for path in paths if path.suffix == ".json")


def _in_folder(folder: Path) -> Path:
    """The index of a folder, else its only safetensors file."""
    indices = sorted(folder.glob("*.safetensors.index.json"))
    candidates = indices or sorted(folder.glob("*.safetensors"))
    if not candidates:
        raise FileNotFoundError(f"no safetensors file or index in the folder {folder}")
    if len(candidates) > 1:
        names = ", ".join(path.name for path in candidates[:4])
        raise ValueError(f"{folder} holds {len(candidates)} candidates ({names}); name the files to load")
    return candidates[0]


def _shards(index: Path) -> tuple[Path, ...]:
    shards = tuple(dict.fromkeys(_weight_map(index).values()))
    for shard in shards:
        if not (index.parent / shard).is_file():
            raise FileNotFoundError(f"{index} names a shard {shard} that is missing")
    return tuple(index.parent / shard for shard in shards)


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name to file name, as an index lists them."""
    if not index.is_file():
        raise FileNotFoundError(f"no weights index {index}")
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = {str(name): str(shard) for name, shard in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is not a safetensors index: it has no table 'weight_map'") from error
    for shard in names.values():
        if shard in ("", "..") or Path(shard).name != shard:
            raise ValueError(f"{index} names a shard {shard!r} outside its own folder")
    return names


def _check_shard_numbers(files: tuple[Path, ...]) -> None:
    """Of `x-00001-of-00003.safetensors` all three must be there."""
    for file in files:
        siblings = shards_of(file)
        for sibling in siblings:
            if sibling not in files:
                raise FileNotFoundError(f"{file.name} is one of {len(siblings):05d} shards; {sibling} is missing")
