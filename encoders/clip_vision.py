"""CLIP's vision towers, as transformers computes them: pictures to the states of their patches.

Legend: K pictures, H W pixels, S pixels a side of what the tower reads, L patches and one token more, D width.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..core.json_file import json_object
from ..core.naming import naming
from ..core.offload import StoredWeights
from ..core.saving import Held
from ..language.families.base import Entries
from .folders import Architecture, load_text_model, text_architecture
from .origin import TextComponent, TextOrigin
from .qwen_vl_pictures import CLIP_MEAN, CLIP_STD, bicubic, three_numbers

if TYPE_CHECKING:
    from transformers import CLIPVisionModel

PROCESSOR, PROCESSOR_CONFIG = "CLIPImageProcessor", "preprocessor_config.json"
KNOWN = (
    Architecture(
        model="CLIPVisionModel",
        config="CLIPVisionConfig",
        prefixes=("vision_model.", ""),
        drops=("embeddings.position_ids",),
    ),
    Architecture(
        model="CLIPVisionModelWithProjection",
        config="CLIPVisionConfig",
        drops=("vision_model.embeddings.position_ids",),
    ),
)


@dataclass(frozen=True, kw_only=True)
class SquareReader:
    """Pictures resized until the shorter side has `shortest` pixels, the middle `side` x `side` of them, each channel
    normalised by `mean` and `std`."""

    shortest: int = 224
    side: int = 224
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> "SquareReader":
        """From the entries of a preprocessor_config.json.

        Raises:
            ValueError: an entry that makes no sense, or a step that is left out or another one.
        """
        given = Entries(entries)
        for step in ("do_resize", "do_center_crop", "do_rescale", "do_normalize"):
            if not given.flag(step, True):
                raise ValueError(f"the processor's {step} is false, which is not supported")
        if given.size("resample", 3) != 3 or abs(given.number("rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
            raise ValueError("the processor resizes otherwise than bicubic, or scales by another factor than 1/255")
        shortest = _side(given, "size", "shortest_edge")
        side = _side(given, "crop_size", "height")
        if side > shortest or _side(given, "crop_size", "width") != side:
            raise ValueError(f"the processor's crop_size is {entries['crop_size']!r}, which is no square in {shortest}")
        mean, std = three_numbers(given, "image_mean", CLIP_MEAN), three_numbers(given, "image_std", CLIP_STD)
        return cls(shortest=shortest, side=side, mean=mean, std=std)

    def __call__(self, picture: Tensor) -> Tensor:
        """[3, S, S] of a picture [3, H, W] in 0..1, float32 on the CPU."""
        height, width = picture.shape[1:]
        scale = self.shortest / min(height, width)
        tall, wide = (self.shortest if side == min(height, width) else int(scale * side) for side in (height, width))
        top, left = (tall - self.side) // 2, (wide - self.side) // 2
        square = bicubic(picture, tall, wide)[:, top : top + self.side, left : left + self.side]
        mean, std = (torch.tensor(each)[:, None, None] for each in (self.mean, self.std))
        return (square - mean) / std


@dataclass(frozen=True, kw_only=True)
class ClipVisionEncoder:
    """The states that the last block reads. With `stored`, the model is on the meta device and each call reads its
    weights; `origin` is where it was loaded from."""

    model: "CLIPVisionModel"
    reader: SquareReader
    stored: StoredWeights | None = None
    origin: TextOrigin | None = None

    @torch.no_grad()
    def __call__(self, pictures: Sequence[Tensor]) -> Tensor:
        """States [K, L, D] of pictures [3, H, W] in 0..1, of any sizes."""
        if self.stored is not None:
            return self.resident()(pictures)
        pixels = torch.stack([self.reader(picture) for picture in pictures])
        model = cast(Any, self.model)
        return model(pixel_values=pixels.to(model.device, model.dtype), output_hidden_states=True).hidden_states[-2]

    def resident(self) -> "ClipVisionEncoder":
        """The same encoder with its weights in memory."""
        if self.stored is None:
            return self
        return dataclasses.replace(self, model=self.stored.resident(self.model), stored=None)

    def component(self) -> TextComponent:
        """See `SaveableEncoder`; its processor stands for a tokenizer."""
        if self.origin is None:
            raise ValueError("it was not loaded from files, so there is no config to save")
        kind = text_architecture(self.origin.model, KNOWN)
        source = None if self.stored is None else self.stored.source
        held = Held(module=self.model, key_map=kind.key_map(self.model), source=source)
        found = self.origin.component(self.reader, (held,))
        return dataclasses.replace(found, tokenizer_class=PROCESSOR)


def load_clip_vision(
    folder: Path,
    processor: Path,
    *,
    variant: str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> ClipVisionEncoder:
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
        reader = SquareReader.from_entries(entries)
    model, stored = load_text_model(
        folder, text_architecture(folder, KNOWN), variant=variant, device=device, dtype=dtype
    )
    if model.config.image_size != reader.side:
        size = model.config.image_size
        raise ValueError(f"{place}: pictures become {reader.side} pixels a side; {folder} reads {size}")
    origin = TextOrigin.of(folder, processor, variant, reader)
    return ClipVisionEncoder(model=model, reader=reader, stored=stored, origin=origin)


def _side(given: Entries, name: str, key: str) -> int:
    """A number of pixels, which older files give alone."""
    found: object = given.values.get(name)
    sizes = cast(Mapping[str, Any], found) if isinstance(found, Mapping) else {} if found is None else {key: found}
    return Entries(sizes).size(key, 224)
