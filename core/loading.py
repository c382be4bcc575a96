"""Weights from safetensors or GGUF files into a module, and to safetensors.

Loading streams: each parameter is allocated once, in its final format and place, and its parts are copied, or
dequantised, straight from the mapped file. Anonymous memory at the peak is the weights alone (plus one part, cast, on
its way to a device).
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .checkpoint import Files, Header, file_digest, read_header
from .key_map import KeyMap, identity_key_map, named_weights
from .saving import weights_of, write_weights
from .weight_source import WeightSource

__all__ = [
    "Files",
    "Header",
    "WeightSource",
    "build_on_meta",
    "file_digest",
    "fill_module",
    "load_weights",
    "read_header",
    "save_weights",
]

_INITIALISERS: frozenset[Callable[..., Any]] = frozenset(
    (Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)
)
_M = TypeVar("_M", bound=nn.Module)


def build_on_meta(build: Callable[[], _M]) -> _M:
    """The module that `build` makes, with weights that have shapes but no memory, and no initialisation.

    Prefer it to a bare `torch.device("meta")`: there the normal distribution of `nn.Embedding` imports 800 modules.
    """
    with torch.device("meta"), _Uninitialised():
        return build()


def load_weights(
    module: nn.Module,
    files: Files,
    key_map: KeyMap | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    hoisted: Callable[[str], bool] | None = None,
) -> None:
    """Gives a module, usually built on the meta device, the weights of a checkpoint.

    Floating parameters and buffers become `dtype` (None: as the module declares them); others keep their type. `files`
    is a safetensors or `.gguf` file, an index, a folder, or several; `key_map` None means our own names. Parameters
    whose name `hoisted` accepts are checked but get no values, only `dtype` on the meta device, to be read through a
    `WeightSource`. Everything is checked before anything is allocated, and the module changes only when all was read.

    Raises FileNotFoundError for a missing file or shard, ValueError for a file that is not whole, is in a format that
    cannot be read, or does not fit the module in names, shapes or kinds of number.
    """
    key_map = identity_key_map(module) if key_map is None else key_map
    with WeightSource.for_module(module, files, key_map) as source:
        fill_module(module, source, dtype=dtype, device=device, hoisted=hoisted)


def fill_module(
    module: nn.Module,
    source: WeightSource,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    hoisted: Callable[[str], bool] | None = None,
) -> None:
    """`load_weights` from a source that was made for the module already, and stays open."""
    weights = named_weights(module)
    _check_other_buffers(module, weights)
    values: dict[int, Tensor] = {}
    for name in source:
        old = weights[name]
        wanted = dtype if dtype is not None and old.dtype.is_floating_point else old.dtype
        if hoisted is None or not hoisted(name):
            values[id(old)] = source.read(name, dtype=wanted, device=device)
        elif old.is_meta:
            values[id(old)] = old.detach().to(wanted)
    _assign(module, values, torch.device(device))


def save_weights(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a module's parameters and persistent buffers, shared ones once, as one safetensors file.

    Floating ones are cast to `dtype` if given. The same weights always give the same bytes. The file appears whole or
    not at all: it is written beside `path`, then moved. Raises FileNotFoundError if the folder does not exist,
    ValueError if a weight has no value (meta device) or the file cannot be written.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent} to write {path.name} to")
    weights = weights_of(module)
    if dtype is not None:
        weights = {
            name: replace(weight, dtype=dtype) if weight.dtype.is_floating_point else weight
            for name, weight in weights.items()
        }
    try:
        write_weights(path, weights, metadata)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error


class _Uninitialised(TorchFunctionMode):
    """Initialisers return their tensor as it is."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _INITIALISERS:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def _check_other_buffers(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    persistent = {id(weight) for weight in weights.values()}
    for name, buffer in module.named_buffers():
        if buffer.is_meta and id(buffer) not in persistent:
            raise ValueError(f"buffer {name} is on the meta device and in no checkpoint: it would have no value")


def _assign(module: nn.Module, values: Mapping[int, Tensor], device: torch.device) -> None:
    """Puts new tensors, by the id of the old ones, in every place that has the old one."""
    parameters: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, old in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if id(old) in values:
                new = nn.Parameter(values[id(old)], requires_grad=old.requires_grad)
                setattr(owner, name, parameters.setdefault(id(old), new))
        for name, old in list(owner.named_buffers(recurse=False, remove_duplicate=False)):
            if id(old) in values:
                setattr(owner, name, values[id(old)])
            elif not old.is_meta:
                setattr(owner, name, old.to(device))
