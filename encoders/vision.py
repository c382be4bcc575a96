"""Vision towers of transformers that see whole pictures: from pictures to the states of their patches.

Legend: K pictures, H W pixels, S pixels a side of what the tower reads, L patches (and one token more), D width.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core.json_file import json_object
from ..core.naming import naming
from ..core.offload import StoredWeights
from ..core.saving import Held
from ..language.families.base import Entries
from .folders import Architecture, load_text_model, text_architecture
from .origin import TextComponent, TextOrigin

PROCESSOR_CONFIG = "preprocessor_config.json"


class Reader(Protocol):
    """How a picture becomes what a tower reads; immutable."""

    @property
    def side(self) -> int:
        """S."""
        ...

    def __call__(self, picture: Tensor) -> Tensor:
        """[3, S, S] of a picture [3, H, W] in 0..1, float32 on the CPU."""
        ...


@dataclass(frozen=True, kw_only=True)
class VisionKind:
    """A kind of tower: its architectures, the class of its processor in transformers, what the entries of a
    preprocessor_config.json make, and what is read of the model for pixels [K, 3, S, S]."""

    known: tuple[Architecture, ...]
    processor: str
    reader: Callable[[Mapping[str, Any]], Reader]
    states: Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class VisionEncoder:
    """A tower and how it reads pictures. With `stored`, the model is on the meta device and each call reads its
    weights; `origin` is where it was loaded from."""

    kind: VisionKind
    model: Any
    reader: Reader
    stored: StoredWeights | None = None
    origin: TextOrigin | None = None

    @torch.no_grad()
    def __call__(self, pictures: Sequence[Tensor]) -> Tensor:
        """States [K, L, D] of pictures [3, H, W] in 0..1, of any sizes."""
        if self.stored is not None:
            return self.resident()(pictures)
        pixels = torch.stack([self.reader(picture) for picture in pictures])
        return self.kind.states(self.model, pixels.to(self.model.device, self.model.dtype))

    def resident(self) -> "VisionEncoder":
        """The same encoder with its weights in memory."""
        if self.stored is None:
            return self
        return dataclasses.replace(self, model=self.stored.resident(self.model), stored=None)

    def component(self) -> TextComponent:
        """See `SaveableEncoder`; its processor stands for a tokenizer."""
        if self.origin is None:
            raise ValueError("it was not loaded from files, so there is no config to save")
        architecture = text_architecture(self.origin.model, self.kind.known)
        source = None if self.stored is None else self.stored.source
        held = Held(module=self.model, key_map=architecture.key_map(self.model), source=source)
        found = self.origin.component(self.reader, (held,))
        return dataclasses.replace(found, tokenizer_class=self.kind.processor)


def load_vision_encoder(
    kind: VisionKind,
    folder: Path,
    processor: Path,
    *,
    variant: str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> VisionEncoder:
    """The vision tower of a folder in transformers' layout, and the processor of another one. On the meta device,
    weights stay in the files, and each call reads them.

    Raises:
        FileNotFoundError: a folder, a config or the weights are missing. ValueError: another architecture, weights that
        do not fit the config, a processor that reads pictures otherwise.
    """
    place = processor / PROCESSOR_CONFIG
    if not place.is_file():
        raise FileNotFoundError(f"no {PROCESSOR_CONFIG} in {processor}")
    entries = json_object(place)
    with naming(place):
        reader = kind.reader(entries)
    model, stored = load_text_model(
        folder, text_architecture(folder, kind.known), variant=variant, device=device, dtype=dtype
    )
    if model.config.image_size != reader.side:
        size = model.config.image_size
        raise ValueError(f"{place}: pictures become {reader.side} pixels a side; {folder} reads {size}")
    origin = TextOrigin.of(folder, processor, variant, reader)
    return VisionEncoder(kind=kind, model=model, reader=reader, stored=stored, origin=origin)


def check_steps(given: Entries, steps: Sequence[str]) -> None:
    """Makes sure that a processor takes these steps, resizes bicubically, and makes 0..1 of bytes. ValueError
    otherwise."""
    for step in steps:
        if not given.flag(step, True):
            raise ValueError(f"the processor's {step} is false, which is not supported")
    if given.size("resample", 3) != 3 or abs(given.number("rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
        raise ValueError("the processor resizes otherwise than bicubic, or scales by another factor than 1/255")
