"""SigLIP's vision towers, as transformers computes them: pictures to the states of their patches.

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
from .qwen_vl_pictures import bicubic, three_numbers
from .vision import VisionKind, check_steps, load_vision_encoder

HALVES = (0.5, 0.5, 0.5)


@dataclass(frozen=True, kw_only=True)
class WholeReader:
    """Pictures resized to `side` x `side` pixels, whatever their aspect; each channel normalised by `mean` and
    `std`."""

    side: int = 224
    mean: tuple[float, ...] = HALVES
    std: tuple[float, ...] = HALVES

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> "WholeReader":
        """From the entries of a preprocessor_config.json.

        Raises:
            ValueError: an entry that makes no sense, or a step that is left out or another one.
        """
        given = Entries(entries)
        check_steps(given, ("do_resize", "do_rescale", "do_normalize"))
        found: object = given.values.get("size")
        sizes = Entries(cast(Mapping[str, Any], found) if isinstance(found, Mapping) else {})
        side = sizes.size("height", cls.side)
        if sizes.size("width", cls.side) != side:
            raise ValueError(f"the processor's size is {found!r}; it must be a square")
        mean, std = three_numbers(given, "image_mean", HALVES), three_numbers(given, "image_std", HALVES)
        return cls(side=side, mean=mean, std=std)

    def __call__(self, picture: Tensor) -> Tensor:
        """[3, S, S] of a picture [3, H, W] in 0..1, float32 on the CPU."""
        mean, std = (torch.tensor(each)[:, None, None] for each in (self.mean, self.std))
        return (bicubic(picture, self.side, self.side) - mean) / std


def _states(model: Any, pixels: Tensor) -> Tensor:
    """After all blocks and the final norm."""
    return model(pixel_values=pixels).last_hidden_state


SIGLIP = VisionKind(
    known=(
        Architecture(
            model="SiglipVisionModel",
            config="SiglipVisionConfig",
            prefixes=("vision_model.", ""),
            drops=("embeddings.position_ids",),
        ),
    ),
    processor="SiglipImageProcessor",
    reader=WholeReader.from_entries,
    states=_states,
)
load_siglip_vision = partial(load_vision_encoder, SIGLIP)
