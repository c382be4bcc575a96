"""Pictures as Qwen2-VL's and Qwen2.5-VL's vision towers read them: resized, normalised, cut into patches.

Legend: H W pixels, h w patches, N patches (h w), P numbers of a patch.
Source: transformers' Qwen2VLImageProcessorPil.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ..language.families.base import Entries

_MOST_RATIO = 200
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, kw_only=True, eq=False)
class PicturePatches:
    """Patches [N, P] of a picture, those of a token one after the other, and the number of rows and columns of them."""

    patches: Tensor
    grid: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class PictureReader:
    """Sides become multiples of `patch * merge` that keep the ratio as well as they can, with `min_pixels` to
    `max_pixels` in all; each channel is normalised by `mean` and `std`; a patch shows the picture in `frames` frames.
    """

    patch: int = 14
    merge: int = 2
    frames: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> "PictureReader":
        """From the entries of a preprocessor_config.json.

        Raises:
            ValueError: an entry that makes no sense, or a step that is left out.
        """
        given = Entries(entries)
        for step in ("do_resize", "do_rescale", "do_normalize"):
            if not given.flag(step, True):
                raise ValueError(f"the processor's {step} is false, which is not supported")
        if given.size("resample", 3) != 3 or abs(given.number("rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
            raise ValueError("the processor resizes otherwise than bicubic, or scales by another factor than 1/255")
        size: object = given.values.get("size") or {}
        sizes = Entries(cast(Mapping[str, Any], size) if isinstance(size, Mapping) else {})
        shortest, longest = sizes.size("shortest_edge", cls.min_pixels), sizes.size("longest_edge", cls.max_pixels)
        return cls(
            patch=given.size("patch_size", cls.patch),
            merge=given.size("merge_size", cls.merge),
            frames=given.size("temporal_patch_size", cls.frames),
            min_pixels=given.optional_size("min_pixels") or shortest,
            max_pixels=given.optional_size("max_pixels") or longest,
            mean=three_numbers(given, "image_mean", CLIP_MEAN),
            std=three_numbers(given, "image_std", CLIP_STD),
        )

    def size(self, height: int, width: int) -> tuple[int, int]:
        """The height and width at which a picture is read.

        Raises:
            ValueError: one side is over 200 times as long as the other.
        """
        unit = self.patch * self.merge
        if max(height, width) > _MOST_RATIO * min(height, width):
            raise ValueError(f"a picture is {width}x{height}; one side can be {_MOST_RATIO} times the other at most")
        tall, wide = round(height / unit) * unit, round(width / unit) * unit
        if tall * wide > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            tall, wide = (max(unit, math.floor(side / shrink / unit) * unit) for side in (height, width))
        elif tall * wide < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            tall, wide = (math.ceil(side * grow / unit) * unit for side in (height, width))
        return tall, wide

    def __call__(self, picture: Tensor) -> PicturePatches:
        """The patches of a picture [3, H, W] in 0..1, float32 on the CPU.

        Raises:
            ValueError: not such a picture, or as for `size`.
        """
        if picture.ndim != 3 or len(picture) != 3 or not picture.is_floating_point():
            raise ValueError(f"a picture is {list(picture.shape)} of {picture.dtype}; it must be [3, H, W] of floats")
        height, width = self.size(*picture.shape[1:])
        pixels = bicubic(picture, height, width)
        mean, std = (torch.tensor(each)[:, None, None] for each in (self.mean, self.std))
        grid = (height // self.patch, width // self.patch)
        return PicturePatches(patches=self._patches((pixels - mean) / std), grid=grid)

    def _patches(self, x: Tensor) -> Tensor:
        """[3, H, W] to [N, P]."""
        side, merge = self.patch, self.merge
        x = x.unflatten(2, (-1, merge, side)).unflatten(1, (-1, merge, side))  # [3, h/m, m, side, w/m, m, side]
        x = x.permute(1, 4, 2, 5, 0, 3, 6).flatten(0, 3)  # [N, 3, side, side]
        return x[:, :, None].expand(-1, -1, self.frames, -1, -1).flatten(1)


def bicubic(picture: Tensor, height: int, width: int) -> Tensor:
    """Bicubic on 8 bits, as image processors do it, [3, height, width] in 0..1."""
    from PIL import Image

    levels = (picture.detach().cpu().clamp(0, 1) * 255).round().to(torch.uint8)
    image = Image.fromarray(levels.permute(1, 2, 0).contiguous().numpy(), mode="RGB")
    data = bytearray(image.resize((width, height), Image.Resampling.BICUBIC).tobytes())
    return torch.frombuffer(data, dtype=torch.uint8).view(height, width, 3).permute(2, 0, 1).float() / 255


def three_numbers(given: Entries, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
    """An entry of a preprocessor_config.json, one for each channel. ValueError for anything else."""
    found: object = given.values.get(name, default)
    numbers = cast(Sequence[object], found) if isinstance(found, Sequence) else ()
    if len(numbers) != 3 or not all(type(each) in (int, float) for each in numbers):
        raise ValueError(f"the processor's {name} is {found!r}; it must be three numbers")
    return tuple(float(cast(float, each)) for each in numbers)
