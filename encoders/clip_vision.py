"""CLIP's vision towers, as transformers computes them: pictures to the states of their patches.

Legend: H W pixels, S pixels a side of what the tower reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ..language.families.base import Entries
from .folders import Architecture
from .qwen_vl_pictures import CLIP_MEAN, CLIP_STD, bicubic, three_numbers
from .vision import VisionKind, check_steps, load_vision_encoder

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
        check_steps(given, ("do_resize", "do_center_crop", "do_rescale", "do_normalize"))
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


def _states(model: Any, pixels: Tensor) -> Tensor:
    """Those that the last block reads."""
    return model(pixel_values=pixels, output_hidden_states=True).hidden_states[-2]


CLIP = VisionKind(known=KNOWN, processor="CLIPImageProcessor", reader=SquareReader.from_entries, states=_states)
load_clip_vision = partial(load_vision_encoder, CLIP)


def _side(given: Entries, name: str, key: str) -> int:
    """A number of pixels, which older files give alone."""
    found: object = given.values.get(name)
    sizes = cast(Mapping[str, Any], found) if isinstance(found, Mapping) else {} if found is None else {key: found}
    return Entries(sizes).size(key, 224)
