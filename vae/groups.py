"""Clips worked on a group of frames at a time, by networks that are causal in time.

Legend: B rows, C channels, F frames, H W places.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, cycle
from typing import TypeVar

import torch
from torch import Tensor

from .tiling import InParts

_K = TypeVar("_K")


def frame_groups(pixels: Tensor, group: int) -> list[Tensor]:
    """Clips [B, C, F, H, W] as their first frame, then `group` frames at a time."""
    return [pixels[:, :, :1], *(pixels[:, :, i : i + group] for i in range(1, pixels.shape[2], group))]


def walked(
    run: Callable[[Tensor, _K], Tensor], groups: Iterable[Tensor], parts: InParts, keep: Callable[[], _K]
) -> Iterator[Tensor]:
    """`run` on each group of frames, part by part: in the same order each time, so that each part finds what `keep`
    made for it, where `run` leaves what later frames read."""
    rest = iter(groups)
    first = next(rest, None)
    if first is None:
        return
    kept = cycle([keep() for _ in range(parts.count(first))])
    for group in chain((first,), rest):
        yield parts(lambda part: run(part, next(kept)), group)


def put_together(groups: Iterable[Tensor], latents: Tensor, downsampling: int, group: int) -> Tensor:
    """Groups of frames as the one clip [B, 3, F, H, W], float32, of latents [B, C, f, h, w]; each is let go of as soon
    as it is in."""
    rows, _, frames, height, width = latents.shape
    shape = (rows, 3, 1 + (frames - 1) * group, height * downsampling, width * downsampling)
    clip, start = torch.empty(shape, dtype=torch.float32, device=latents.device), 0
    for part in groups:
        clip[:, :, start : start + part.shape[2]] = part
        start += part.shape[2]
    return clip
