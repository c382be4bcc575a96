"""Weights to safetensors files: each tensor is made when its turn comes, so that no second copy of all is held.

A key map is followed backwards here: its operations are views, so that a stored tensor is filled through them.
"""

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from .checkpoint import DTYPES, Files, read_checkpoint
from .key_map import Fill, KeyMap, PlacedPart, named_weights
from .row_operations import Shape, apply_shape, apply_view
from .weight_source import WeightSource
from .whole_file import whole_file

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_Uses = list[tuple["Weight", PlacedPart]]


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One tensor to be written, in `dtype`; `read` gives its values, on any device and in any dtype of its kind."""

    shape: Shape
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """In the file."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Component:
    """One part of a model as a folder in diffusers' layout holds it: its config.json's entries, and its weights by the
    names that are used there."""

    entries: Mapping[str, Any]
    weights: Mapping[str, Weight]


@runtime_checkable
class Saveable(Protocol):
    """A part of a model that knows how it is saved."""

    @property
    def config(self) -> object:
        """Its sizes, equal to those of another part that has the same config.json."""
        ...

    def component(self) -> Component:
        """What its folder holds. Nothing is read yet.

        Raises:
            ValueError: it cannot be saved; the message says why.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Held:
    """A module that holds weights of a checkpoint, named by `key_map`; those on the meta device are in `source`.
    `copies` are names that files may hold for what has another name already."""

    module: nn.Module
    key_map: KeyMap
    source: WeightSource | None = None
    copies: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def dtype(self) -> torch.dtype:
        """Of its first floating-point weight."""
        return next(weight.dtype for weight in self.module.parameters() if weight.is_floating_point())

    def weights(self) -> dict[str, Weight]:
        """All by the module's names. ValueError for one that has no values anywhere."""
        return weights_of(self.module, self.source)


def weights_of(module: nn.Module, source: WeightSource | None = None) -> dict[str, Weight]:
    """A module's parameters and persistent buffers, shared ones once; those on the meta device are read from `source`.

    Raises:
        ValueError: one has no values anywhere.
    """
    return {name: _weight(name, weight.detach(), source) for name, weight in named_weights(module).items()}


def as_stored(weights: Mapping[str, Weight], key_map: KeyMap, shapes: Mapping[str, Shape]) -> dict[str, Weight]:
    """The tensors of the `shapes` from which the key map would make these weights; those that it drops are left out.

    Raises:
        ValueError: the map does not fit, or a tensor is not held as a whole.
    """
    fills = key_map.plan(shapes, {name: weight.shape for name, weight in weights.items()}, origin="the layout")
    return {name: _undone(name, shapes[name], uses) for name, uses in _uses(fills, weights).items()}


def stored_again(files: Files, held: tuple[Held, ...]) -> dict[str, Weight]:
    """Every tensor of a checkpoint, with the values that modules hold now, in their dtype; others as they are in the
    files, where they are floating-point numbers in the first module's dtype.

    Raises:
        FileNotFoundError, ValueError: the files are not those that the modules are made of.
    """
    tensors = read_checkpoint(files)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    source = WeightSource.as_stored(tensors)
    found = {
        name: _weight(name, torch.empty(shape, dtype=_kept(tensors[name].dtype, held[0].dtype), device="meta"), source)
        for name, shape in shapes.items()
    }
    for each in held:
        now = as_stored(each.weights(), each.key_map, shapes)
        found |= now | {copy: now[name] for copy, name in each.copies.items() if copy in shapes and name in now}
    return found


def write_weights(path: Path, weights: Mapping[str, Weight], metadata: Mapping[str, str] | None = None) -> None:
    """Writes one safetensors file, which appears whole or not at all. The same weights always give the same bytes.

    Raises:
        ValueError: a dtype that the format does not have. OSError: the file cannot be written.
    """
    for name, weight in weights.items():
        if weight.dtype not in _CODES:
            raise ValueError(f"cannot save {name}: safetensors has no format for {weight.dtype}")
    with whole_file(path) as beside, beside.open("wb") as stream:
        _write(stream, weights, metadata or {})


def _write(stream: BinaryIO, weights: Mapping[str, Weight], metadata: Mapping[str, str]) -> None:
    """The format: length of the header (8 bytes), the header (JSON, padded to 8 bytes), the tensors end to end."""
    names = sorted(weights, key=lambda name: (-weights[name].dtype.itemsize, name))  # widest first keeps all aligned
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    position = 0
    for name in names:
        weight, stop = weights[name], position + weights[name].num_bytes
        header[name] = {
            "dtype": _CODES[weight.dtype],
            "shape": list(weight.shape),
            "data_offsets": [position, stop],
        }
        position = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    stream.write(struct.pack("<Q", len(text)) + text)
    for name in names:
        stored = weights[name].read().to("cpu", weights[name].dtype).contiguous()
        stream.write(stored.reshape(-1).view(torch.uint8).numpy().data)


def _weight(name: str, tensor: Tensor, source: WeightSource | None) -> Weight:
    shape, dtype = tuple(tensor.shape), tensor.dtype
    if not tensor.is_meta:
        return Weight(shape=shape, dtype=dtype, read=lambda: tensor)
    if source is None:
        raise ValueError(f"cannot save {name}: it is on the meta device and has no value")
    return Weight(shape=shape, dtype=dtype, read=lambda: source.read(name, dtype=dtype))


def _uses(fills: Mapping[str, Fill], weights: Mapping[str, Weight]) -> dict[str, _Uses]:
    """By each stored tensor, the weights that it is a part of, and where."""
    uses: dict[str, _Uses] = {}
    for name, fill in fills.items():
        for part in fill.parts:
            uses.setdefault(part.source, []).append((weights[name], part))
    return uses


def _undone(name: str, shape: Shape, uses: _Uses) -> Weight:
    """The stored tensor whose views, by the operations of its uses, are parts of weights."""
    sizes = {part.operations: prod(apply_shape(part.operations, shape)) for _, part in uses}
    if sum(sizes.values()) != prod(shape):
        raise ValueError(f"cannot save {name}: {sum(sizes.values())} of its {prod(shape)} numbers are held")
    dtype = uses[0][0].dtype

    def read() -> Tensor:
        stored = torch.empty(shape, dtype=dtype)
        for weight, part in uses:
            view = apply_view(part.operations, stored)
            assert view.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr(), part
            whole = weight.read()
            rows = whole if not weight.shape else whole[part.start : part.stop]
            view.copy_(rows.reshape(view.shape))
        return stored

    return Weight(shape=shape, dtype=dtype, read=read)


def _kept(stored: torch.dtype, held: torch.dtype) -> torch.dtype:
    return held if stored.is_floating_point else stored
