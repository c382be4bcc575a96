"""GGUF files (llama.cpp): metadata, and tensors that are plain or in GGML's quantised blocks.

The header is read by hand: the `gguf` package takes seconds where a vocabulary has 50 000 words. Only it and the sizes
are read at first, so a wrong file is refused before anything is allocated. The format is described in
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import os
import re
import struct
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from .ops.dequantise import BLOCK_FORMATS, dequantise
from .stored_tensor import StoredTensor

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
"""Before a tensor's name, in the metadata: its shape, where it is stored in another, of rows that are whole blocks."""
_LEAST_TENSOR_BYTES, _LEAST_ENTRY_BYTES = 24, 13
_LENGTH = struct.Struct("<Q")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf")
_PLAIN = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
# fmt: off
_TYPES = (
    "F32", "F16", "Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16",
    "I32", "I64", "F64", "IQ1_M", "BF16", "Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8", "TQ1_0", "TQ2_0", "IQ4_NL_4_4",
    "IQ4_NL_4_8", "IQ4_NL_8_8", "MXFP4", "NVFP4",
)
# fmt: on


class GGUFFile:
    """A GGUF file: `metadata` by key (numbers, texts, lists of them) and `tensors` by name, in the file's order.

    Shapes are in torch's order. Nothing of the tensors is read until `read`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not GGUF, of another byte order or version, truncated, corrupted, or with a tensor in a format that
            cannot be read; the message names it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"no weights file {self.path}")
        header = _Header(self.path)
        self.metadata: dict[str, Any] = header.metadata
        self.tensors: dict[str, StoredTensor] = header.tensors
        self._file: MappedFile | None = None

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """A tensor, or some of its rows, as float32. Raises ValueError for an unknown name."""
        if name not in self.tensors:
            known = ", ".join([*self.tensors][:3])
            raise ValueError(f"{self.path} has no tensor {name!r}; it has {len(self.tensors)}: {known}, ...")
        tensor = self.tensors[name]
        if self._file is None:
            self._file = MappedFile(self.path)
        stored = self._file.view(tensor)
        if tensor.blocks is not None and not tensor.has_whole_rows:
            values = dequantise(tensor.blocks, stored).view(tensor.shape)
            return values if rows is None else values[rows].clone()
        stored = stored if rows is None else stored[rows]
        return stored.to(torch.float32, copy=True) if tensor.blocks is None else dequantise(tensor.blocks, stored)


class MappedFile:
    """The bytes of a whole file, mapped; nothing is read before it is looked at."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as stream:
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def view(self, tensor: StoredTensor) -> Tensor:
        """A tensor as it lies in the file: plain values in its shape, or packed rows [..., bytes] uint8 (blocks, one
        each, where they are not whole rows)."""
        stored = self._bytes[tensor.start : tensor.stop]
        if tensor.blocks is None:
            return stored.view(tensor.dtype).view(tensor.shape)
        if not tensor.has_whole_rows:
            return stored.view(-1, tensor.blocks.bytes)
        return stored.view(*tensor.shape[:-1], -1)

    def forget(self, tensor: StoredTensor) -> None:
        """Let the pages that only this tensor lies on go from memory; they are read again when they are looked at."""
        first = -(-tensor.start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = tensor.stop // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0 and sys.platform != "win32":  # which has no such advice
            self._map.madvise(mmap.MADV_DONTNEED, first, length)


def gguf_shards(path: Path) -> tuple[Path, ...]:
    """The files of a model of which `path` is one: all shards of `x-00001-of-00003.gguf`, else the file alone.

    Raises:
        FileNotFoundError: one of them is missing.
    """
    match = _SHARD.fullmatch(path.name)
    total = int(match["total"]) if match else 0
    names = (f"{match['stem']}-{n:05d}-of-{match['total']}.gguf" for n in range(1, total + 1)) if match else iter(())
    shards: list[Path] = []
    for name in names if total else (path.name,):
        shards.append(path.with_name(name))
        if not shards[-1].is_file():
            raise FileNotFoundError(f"no weights file {shards[-1]}")
    return tuple(shards)


class _Header:
    """The header of a file, read from begin to end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        self.position = 0
        if self.size < len(_MAGIC) + 20:
            raise ValueError(f"{path} is not a GGUF file: it has {self.size} bytes")
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            self.data = data
            num_tensors, num_entries = self._counts()
            self.metadata = self._metadata(num_entries)
            self.tensors = self._tensors(num_tensors)
        if not self.tensors:
            raise ValueError(f"{path} holds no tensors")

    def _counts(self) -> tuple[int, int]:
        magic = self.data[: len(_MAGIC)]
        if magic != _MAGIC:
            raise ValueError(f"{self.path} is not a GGUF file: it begins with the bytes {magic.hex(' ')}")
        self.position = len(_MAGIC)
        version = self._number("I")
        if version & 0xFFFF == 0:
            raise ValueError(f"{self.path} is a big-endian GGUF file; only little-endian ones can be read")
        if version not in _VERSIONS:
            raise ValueError(f"{self.path} is GGUF version {version}; supported are {_VERSIONS[0]} and {_VERSIONS[1]}")
        return self._count(_LEAST_TENSOR_BYTES), self._count(_LEAST_ENTRY_BYTES)

    def _metadata(self, count: int) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for _ in range(count):
            key = self._text()
            if key in entries:
                raise ValueError(f"{self.path} is corrupted: it has two values for {key!r}")
            entries[key] = self._value(key, self._number("I"))
        return entries

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _ARRAY:
            kind = self._number("I")
            if kind == _STRING:
                return self._texts(self._count(_LENGTH.size))
            if kind in _NUMBERS:
                return self._numbers(self._count(struct.calcsize(_NUMBERS[kind])), _NUMBERS[kind])
        raise ValueError(f"{self.path} is corrupted: the value of {key!r} is of the unknown type {kind}")

    def _tensors(self, count: int) -> dict[str, StoredTensor]:
        entries = [self._tensor_entry() for _ in range(count)]
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 8 or alignment % 8:
            raise ValueError(f"{self.path} is corrupted: an alignment of {alignment!r} is not a multiple of 8")
        begin = -(-self.position // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise ValueError(f"{self.path} is corrupted: it has two tensors {name!r}")
            if offset % alignment:
                raise ValueError(f"{self.path} is corrupted: tensor {name!r} begins at {offset}, off the alignment")
            stored = self._stored(name, shape, kind, begin + offset)
            tensors[name] = replace(stored, shape=self._original_shape(name, shape))
        self._check_places(tensors)
        return tensors

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_axes = self._text(), self._number("I")
        if num_axes > 8:
            raise ValueError(f"{self.path} is corrupted: tensor {name!r} has {num_axes} axes")
        shape = tuple(reversed(self._numbers(num_axes, "Q")))
        return name, shape, self._number("I"), self._number("Q")

    def _original_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        found: Any = self.metadata.get(f"{_ORIGINAL_SHAPE}{name}", list(shape))
        sizes = cast(list[Any], found) if isinstance(found, list) else [0]
        if any(type(size) is not int or size < 1 for size in sizes) or prod(sizes) != prod(shape):
            raise ValueError(f"{self.path} is corrupted: {found!r} is no shape for tensor {name!r} of {list(shape)}")
        return tuple(sizes)

    def _stored(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> StoredTensor:
        code = _TYPES[kind] if kind < len(_TYPES) else f"the unknown type {kind}"
        blocks, dtype = BLOCK_FORMATS.get(code), _PLAIN.get(code, torch.float32)
        if blocks is None and code not in _PLAIN:
            supported = ", ".join([*_PLAIN, *BLOCK_FORMATS])
            raise ValueError(f"{self.path}: tensor {name!r} is stored as {code}; supported are {supported}")
        width = shape[-1] if shape else 1
        if min(shape, default=1) < 1 or (blocks is not None and width % blocks.elements):
            raise ValueError(f"{self.path} is corrupted: tensor {name!r} {list(shape)} cannot be stored as {code}")
        row = width * dtype.itemsize if blocks is None else blocks.packed_width(width)
        stop = start + prod(shape[:-1]) * row
        return StoredTensor(name=name, file=self.path, dtype=dtype, shape=shape, start=start, stop=stop, blocks=blocks)

    def _check_places(self, tensors: dict[str, StoredTensor]) -> None:
        position = 0
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
            if tensor.start < position:
                raise ValueError(f"{self.path} is corrupted: tensor {tensor.name!r} overlaps another")
            position = tensor.stop
        if position > self.size:
            raise ValueError(f"{self.path} is truncated: it has {self.size} of {position} bytes")

    def _count(self, least_bytes: int) -> int:
        """A number of things that each take at least `least_bytes`, so that a wrong one is seen at once."""
        count = self._number("Q")
        if count * least_bytes > self.size - self.position:
            raise self._truncated()
        return count

    def _number(self, code: str) -> Any:
        return self._numbers(1, code)[0]

    def _numbers(self, count: int, code: str) -> list[Any]:
        try:
            numbers = struct.unpack_from(f"<{count}{code}", self.data, self.position)
        except struct.error as error:
            raise self._truncated() from error
        self.position += count * struct.calcsize(code)
        return list(numbers)

    def _text(self) -> str:
        return self._texts(1)[0]

    def _texts(self, count: int) -> list[str]:
        data, position, texts, length_of = self.data, self.position, list[str](), _LENGTH.unpack_from
        try:
            for _ in range(count):
                start = position + _LENGTH.size
                position = start + length_of(data, position)[0]
                texts.append(data[start:position].decode())
        except struct.error as error:
            raise self._truncated() from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path} is corrupted: its header holds a text that is not UTF-8") from error
        if position > self.size:
            raise self._truncated()
        self.position = position
        return texts

    def _truncated(self) -> ValueError:
        return ValueError(f"{self.path} is truncated or corrupted: its header ends beyond its {self.size} bytes")
