"""Weights read on demand from mapped files, for parameters that are loaded once or never resident.

The anonymous memory of a read is the result alone: parts are copied, and cast, straight from the mapped file into
their rows.
"""

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from .checkpoint import Files, StoredTensor, read_checkpoint
from .key_map import Fill, KeyMap, named_weights
from .row_operations import Shape, apply_view


class WeightSource:
    """The parameters of one model in its mapped files, by the model's names, with the key map's operations applied.

    Reading changes nothing here, so threads may share a source. Files stay mapped until `close` or the end of `with`.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor], fills: Mapping[str, Fill]) -> None:
        """Opens the files of `tensors`. Raises ValueError if one is not safetensors."""
        self._tensors = dict(tensors)
        self._fills = dict(fills)
        self._files = {tensor.file: _open(tensor.file) for tensor in self._tensors.values()}

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
        """The format of one parameter (of its first part) in its file."""
        return self._tensors[self._fill(name).parts[0].source].dtype

    def read(self, name: str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Tensor:
        """One parameter, newly allocated, contiguous; in its stored format unless `dtype` is given."""
        fill = self._fill(name)
        result = torch.empty(fill.shape, dtype=dtype or self.stored_dtype(name), device=device)
        for part in fill.parts:
            rows = result if len(fill.parts) == 1 else result[part.start : part.stop]
            view = apply_view(part.operations, self._map(part.source))
            rows.view(view.shape).copy_(view)
        return result

    def close(self) -> None:
        """Lets the files go; later reads raise ValueError."""
        self._files.clear()

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

    def _map(self, key: str) -> Tensor:
        file = self._tensors[key].file
        if file not in self._files:
            raise ValueError(f"cannot read {key!r}: the weight source of {file} is closed")
        return self._files[file].get_tensor(key)


def _open(file: object) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is not a valid safetensors file: {error}") from error


def _check_kinds(wanted: torch.dtype, fill: Fill, tensors: Mapping[str, StoredTensor]) -> None:
    """Floating parameters may be stored in any floating format; all else exactly as it is."""
    for part in fill.parts:
        stored = tensors[part.source]
        fits = stored.dtype.is_floating_point if wanted.is_floating_point else stored.dtype == wanted
        if not fits:
            raise ValueError(
                f"{stored.file}: {fill.target} is {wanted} in the model, but {part.source} is stored as {stored.dtype}"
            )
