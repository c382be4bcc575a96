"""Weights that are not finite themselves: looked for when values of a run were not, to say which file is damaged."""

import dataclasses
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from ..core.checkpoint import Files
from ..core.key_map import named_weights
from ..core.weight_source import first_not_finite
from ..denoisers.hoisting import HoistingModule
from ..encoders.base import StoredEncoder
from .finite import NonFiniteError, is_finite
from .origin import denoisers

if TYPE_CHECKING:
    from .image import ImagePipeline

T = TypeVar("T")


@contextmanager
def damage_named(pipe: "ImagePipeline") -> Generator[None, None, None]:
    """Where a NonFiniteError comes out of the block, and a weight of its stage is the cause, names that weight."""
    try:
        yield
    except NonFiniteError as error:
        weight = None if error.weight is not None else _looked_for(pipe, error.stage)
        if weight is None:
            raise
        raise NonFiniteError(error.stage, error.step, error.total, error.block, weight) from None


def naming_damage(pipe: "ImagePipeline", items: Iterator[T]) -> Iterator[T]:
    """The same for what an iterator does."""
    with damage_named(pipe):
        yield from items


def _looked_for(pipe: "ImagePipeline", stage: str) -> str | None:
    """`damaged_weight`; None where it fails, so that what it was looked for is still told."""
    try:
        return damaged_weight(pipe, stage)
    except (RuntimeError, ValueError, OSError, MemoryError):
        return None


def damaged_weight(pipe: "ImagePipeline", stage: str) -> str | None:
    """The first weight of a stage's parts that is not finite, and where it lies; None where all are."""
    for name, part in _parts(pipe, stage).items():
        weight = _not_finite(part)
        if weight is not None:
            return _in_files(_files(pipe, name)) or f"{weight} of {name}"
    return None


def _parts(pipe: "ImagePipeline", stage: str) -> Mapping[str, object]:
    """What computes in a stage, by the names of folders where there are such."""
    layout = None if pipe.origin is None else pipe.origin.layout
    vae = {"vae" if layout is None else layout.vae: pipe.vae}
    if stage == "decode":
        return vae
    if stage == "denoise":
        return {"denoiser": pipe.denoiser} if layout is None else denoisers(pipe, layout)
    folders = {} if layout is None else layout.encoders
    texts = {folders.get(role, role): encoder for role, encoder in pipe.encoders.items()}
    pictures = "looking" if layout is None or layout.pictures is None else layout.pictures[0]
    return {**texts, pictures: pipe.looking, **vae}


def _not_finite(part: object) -> str | None:
    """The name of the first such weight of a part's modules."""
    for module in _modules(part):
        source = module.source if isinstance(module, HoistingModule) else None
        for name, weight in named_weights(module).items():
            value = source.read(name, dtype=torch.float32) if weight.is_meta and source is not None else weight
            if not value.is_meta and not is_finite(value):
                return name
    return None


def _modules(part: object) -> Iterator[nn.Module]:
    """Those in a part; weights that stay in their files are read."""
    part = part.resident() if isinstance(part, StoredEncoder) else part
    if isinstance(part, nn.Module):
        yield part
    elif dataclasses.is_dataclass(part):
        for value in vars(part).values():
            yield from _modules(value)


def _files(pipe: "ImagePipeline", name: str) -> Sequence[Files]:
    """Where the weights of a part may be, as far as that is known."""
    if pipe.origin is not None:
        return [pipe.origin.weights[name]] if name in pipe.origin.weights else []
    return [Path(pipe.source.name) / file for file in pipe.source.weights if file.endswith(".safetensors")]


def _in_files(places: Sequence[Files]) -> str | None:
    """The first tensor there that is not finite; None where all are, or files cannot be read any more."""
    try:
        found = (first_not_finite(files) for files in places)
        tensor = next((each for each in found if each is not None), None)
    except (ValueError, OSError):
        return None
    return None if tensor is None else f"{tensor.name} in {tensor.file}"
