"""Weights read on demand from mapped files, for parameters that are loaded once or never resident.

The anonymous memory of a read is the result alone: parts are copied, and cast or dequantised, straight from the mapped
file into their rows. Quantised rows that a key map reorders are copied once more, still packed.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from .checkpoint import Files, read_checkpoint
from .gguf_file import MappedFile
from .key_map import Fill, KeyMap, PlacedPart, named_weights
from .ops.dequantise import dequantise, dequantise_into
from .row_operations import Operation, Reshape, Shape, apply_view
from .stored_tensor import StoredTensor

_VALUES_AT_ONCE = 1 << 22


class WeightSource:
    """The parameters of one model in its mapped files, by the model's names, with the key map's operations applied.

    Reading changes nothing here, so threads may share a source. Files stay mapped until `close` or the end of `with`.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor], fills: Mapping[str, Fill]) -> None:
        """Opens the files of `tensors`. Raises ValueError if one is not what its name says."""
        self._tensors = dict(tensors)
        self._fills = dict(fills)
        factors = (tensor.factor for tensor in self._tensors.values() if tensor.factor is not None)
        self._files = {file: _open(file) for file in dict.fromkeys(x.file for x in (*self._tensors.values(), *factors))}

    @classmethod
    def for_module(cls, module: nn.Module, files: Files, key_map: KeyMap) -> Self:
        """A source of every parameter and persistent buffer of a module (on the meta device or not).

        All headers, keys, shapes and kinds of number are checked here: FileNotFoundError for a missing file or shard,
        ValueError for anything else. Nothing is allocated.
        """
        tensors = read_checkpoint(files)
        weights = named_weights(module)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        paths = list(dict.fromkeys(tensor.file for tensor in tensors.values()))
        origin = str(paths[0]) if len(paths) == 1 else f"{paths[0]} (and {len(paths) - 1} more)"
        fills = key_map.plan(shapes, {name: tuple(x.shape) for name, x in weights.items()}, origin=origin)
        for name, fill in fills.items():
            _check_kinds(weights[name].dtype, fill, tensors)
        return cls(tensors, fills)

    @classmethod
    def as_stored(cls, tensors: Mapping[str, StoredTensor]) -> Self:
        """A source of tensors of files by their own names. Raises ValueError if a file is not what its name says."""
        return cls(tensors, {name: _whole(name, tensor.shape) for name, tensor in tensors.items()})

    def __contains__(self, name: str) -> bool:
        return name in self._fills

    def __iter__(self) -> Iterator[str]:
        """The names, in the order in which their first parts lie in the files."""
        files = {file: place for place, file in enumerate(self._files)}
        firsts = {name: self._tensors[fill.parts[0].source] for name, fill in self._fills.items()}
        return iter(sorted(firsts, key=lambda name: (files[firsts[name].file], firsts[name].start)))

    def shape(self, name: str) -> Shape:
        """The shape of one parameter."""
        return self._fill(name).shape

    def stored_dtype(self, name: str) -> torch.dtype:
        """The format of one parameter (of its first part) in its file; float32 for quantised and for scaled ones."""
        first = self._tensors[self._fill(name).parts[0].source]
        return first.dtype if first.factor is None else torch.float32

    def read(self, name: str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Tensor:
        """One parameter, newly allocated, contiguous; in its stored format unless `dtype` is given."""
        fill = self._fill(name)
        result = torch.empty(fill.shape, dtype=dtype or self.stored_dtype(name), device=device)
        for part in fill.parts:
            rows = result if len(fill.parts) == 1 else result[part.start : part.stop]
            self._copy(part, rows)
            tensor = self._tensors[part.source]
            self._files[tensor.file].forget(tensor)
        return result

    def read_rows(
        self,
        name: str,
        rows: slice,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Rows of one parameter, as `read` gives them; where it lies in its file as it is, only these are read."""
        fill = self._fill(name)
        part = fill.parts[0]
        tensor = self._tensors[part.source]
        if len(fill.parts) > 1 or tensor.blocks is not None or tensor.factor is not None:
            return self.read(name, dtype=dtype, device=device)[rows].clone()
        view = apply_view(part.operations, self._view(part)).reshape(fill.shape)[rows]
        return view.to(device=device, dtype=dtype or tensor.dtype, copy=True)

    def close(self) -> None:
        """Lets the files go; later reads raise ValueError."""
        self._files.clear()

    def __deepcopy__(self, memo: object) -> Self:
        """Itself: it never changes, and the files can be shared."""
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _fill(self, name: str) -> Fill:
        if name not in self._fills:
            raise ValueError(f"no weight {name!r}; known are {len(self._fills)}: {', '.join([*self._fills][:3])}, ...")
        return self._fills[name]

    def _copy(self, part: PlacedPart, rows: Tensor) -> None:
        """Puts a part into its rows of a parameter."""
        tensor = self._tensors[part.source]
        stored, operations = self._view(part), part.operations
        if tensor.blocks is not None and _keep_rows_whole(operations, tensor):
            packed = apply_view(_without_last_reshapes(operations), stored)
            dequantise_into(tensor.blocks, packed.to(rows.device), rows)
            return
        values = stored if tensor.blocks is None else dequantise(tensor.blocks, stored).view(tensor.shape)
        view = apply_view(operations, values)
        rows.view(view.shape).copy_(view)
        if tensor.factor is not None:
            rows.mul_(self._files[tensor.factor.file].view(tensor.factor).item())

    def _view(self, part: PlacedPart) -> Tensor:
        """A part's tensor as it is stored, in its mapped file."""
        tensor = self._tensors[part.source]
        if tensor.file not in self._files:
            raise ValueError(f"cannot read {part.source!r}: the weight source of {tensor.file} is closed")
        return self._files[tensor.file].view(tensor)


def are_equal(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether two stored tensors have one format without a factor, one shape and the same values; read some at a time.

    Raises:
        ValueError: a file that is not what its name says.
    """
    if (a.shape, a.dtype, a.blocks) != (b.shape, b.dtype, b.blocks) or a.factor is not None or b.factor is not None:
        return False
    files = _open(a.file), _open(b.file)  # mapped as long as their parts are read
    x, y = (file.view(each).flatten().split(_VALUES_AT_ONCE) for file, each in zip(files, (a, b), strict=True))
    return all(torch.equal(one, other) for one, other in zip(x, y, strict=True))


def first_not_finite(files: Files) -> StoredTensor | None:
    """The first tensor of a checkpoint that holds a NaN or an infinity; read one after the other.

    Raises:
        FileNotFoundError, ValueError: the files are not there, or not what their names say.
    """
    tensors = read_checkpoint(files)
    floating = {name: tensor for name, tensor in tensors.items() if tensor.dtype.is_floating_point}
    source = WeightSource.as_stored(floating)
    return next((floating[name] for name in source if not _is_finite(source.read(name, dtype=torch.float32))), None)


def _is_finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values).all())


def _whole(name: str, shape: Shape) -> Fill:
    """A tensor as it is stored."""
    part = PlacedPart(source=name, operations=(), start=0, stop=shape[0] if shape else 1)
    return Fill(target=name, shape=shape, parts=(part,))


class _OpenFile(Protocol):
    """A mapped file."""

    def view(self, tensor: StoredTensor) -> Tensor:
        """A tensor as it is stored: plain values, or packed rows [..., bytes] uint8."""
        ...

    def forget(self, tensor: StoredTensor) -> None:
        """Let what was read of it go from memory, where that can be said."""
        ...


class _OpenSafetensors:
    def __init__(self, file: Path) -> None:
        try:
            self._file = safe_open(file, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{file} is not a valid safetensors file: {error}") from error

    def view(self, tensor: StoredTensor) -> Tensor:
        return self._file.get_tensor(tensor.name)

    def forget(self, tensor: StoredTensor) -> None:
        pass  # its mapping is the safetensors package's


def _open(file: Path) -> _OpenFile:
    return MappedFile(file) if file.suffix.lower() == ".gguf" else _OpenSafetensors(file)


def _keep_rows_whole(operations: tuple[Operation, ...], tensor: StoredTensor) -> bool:
    """Whether operations pick and order whole rows, so that they can be done on packed ones."""
    kept = _without_last_reshapes(operations)
    if not tensor.has_whole_rows:
        return not kept
    return len(tensor.shape) > 1 and not any(isinstance(operation, Reshape) for operation in kept)


def _without_last_reshapes(operations: tuple[Operation, ...]) -> tuple[Operation, ...]:
    """The operations that may change the order of the values."""
    count = len(operations)
    while count and isinstance(operations[count - 1], Reshape):
        count -= 1
    return operations[:count]


def _check_kinds(wanted: torch.dtype, fill: Fill, tensors: Mapping[str, StoredTensor]) -> None:
    """Floating parameters may be stored in any floating format; all else exactly as it is."""
    for part in fill.parts:
        stored = tensors[part.source]
        fits = stored.dtype.is_floating_point if wanted.is_floating_point else stored.dtype == wanted
        if not fits:
            raise ValueError(
                f"{stored.file}: {fill.target} is {wanted} in the model, but {part.source} is stored as {stored.dtype}"
            )
