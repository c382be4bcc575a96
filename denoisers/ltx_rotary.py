"""LTX-Video's rotary tables: positions are shares of a largest clip, frequencies the same for all axes and heads.

Legend: B rows, L tokens, D width.
"""

import math

import torch
from torch import Tensor

from ..core.rotary import Rotary, grid_positions

LARGEST = (20.0, 2048.0, 2048.0)  # seconds, pixels, pixels
THETA = 10000.0
AXES = len(LARGEST)
NUM_PLACES = AXES + 2


def fractional_rotary(width: int, cells: tuple[int, int, int], places: Tensor) -> Rotary:
    """Tables for a grid of `cells` (frames, rows, columns): D / 2 pairs, of which the first ones do not turn where
    three axes leave some.

    `places` [B or 1, 5 or more] say where cells are: a tick in seconds; pixels from a row, and from a column, to the
    next; and what `frame_ticks` reads.

    Computed on the CPU in float32 in the reference's order: angles go up to 15,708, where a last bit shows.
    """
    each = places.to("cpu", torch.float32)
    _, *sides = grid_positions(cells).float().unbind(-1)
    ticks = frame_ticks(each, cells[0]).repeat_interleave(cells[1] * cells[2], dim=1)  # [B, L]
    positions = torch.stack((ticks, *(side.expand_as(ticks) for side in sides)), dim=-1)
    shares = positions * each[:, None, :AXES] / torch.tensor(LARGEST)  # [B, L, 3]
    count = width // (2 * AXES)
    exponents = torch.linspace(0.0, 1.0, count, dtype=torch.float32, device="cpu")
    frequencies = THETA**exponents * math.pi / 2.0
    angles = (frequencies * (shares[..., None] * 2 - 1)).transpose(-1, -2).flatten(2)  # the axes side by side
    still = angles.new_zeros(*angles.shape[:2], width // 2 - AXES * count)
    turned = torch.cat((still, angles), dim=-1)
    cos, sin = (table.to(places.device) for table in (turned.cos(), turned.sin()))
    return Rotary(cos=cos, sin=sin, pairing="interleaved")


def frame_ticks(places: Tensor, num_frames: int) -> Tensor:
    """When each of F latent frames is shown, in ticks, [B, F]. `places` [B, 5] say how many there are from a frame to
    the next, and how many earlier all but the first are; [B, 5 + 2 F] then say it of each."""
    if places.shape[1] > NUM_PLACES:
        return places[:, NUM_PLACES : NUM_PLACES + num_frames]
    frames = torch.arange(num_frames, dtype=torch.float32, device=places.device)
    return (frames * places[:, AXES, None] - places[:, AXES + 1, None]).clamp(min=0)


def frame_levels(places: Tensor, num_frames: int) -> list[float]:
    """The highest noise level that a model is told of each of F latent frames, all 1 but for those that it knows
    something of: 1 - the last F numbers of `places` [B, 5 + 2 F], which are the same in all rows.

    Raises:
        ValueError: they are not.
    """
    if places.shape[1] == NUM_PLACES:
        return [1.0] * num_frames
    strengths = places[:, NUM_PLACES + num_frames :]
    if not bool((strengths == strengths[:1]).all()):
        raise ValueError("time_ids: what is known of frames is another share in each row; it must be one for all")
    return (1 - strengths[0].float()).tolist()
