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

    `places` [B or 1, 5] say where cells are: a tick in seconds; pixels from a row, and from a column, to the next;
    ticks from a frame to the next, and how many earlier all but the first are.

    Computed on the CPU in float32 in the reference's order: angles go up to 15,708, where a last bit shows.
    """
    each = places.to("cpu", torch.float32)[:, None]  # [B, 1, 5]
    frames, *sides = grid_positions(cells).float().unbind(-1)
    ticks = (frames * each[..., AXES] - each[..., AXES + 1]).clamp(min=0)  # [B, L]
    positions = torch.stack((ticks, *(side.expand_as(ticks) for side in sides)), dim=-1)
    shares = positions * each[..., :AXES] / torch.tensor(LARGEST)  # [B, L, 3]
    count = width // (2 * AXES)
    exponents = torch.linspace(0.0, 1.0, count, dtype=torch.float32, device="cpu")
    frequencies = THETA**exponents * math.pi / 2.0
    angles = (frequencies * (shares[..., None] * 2 - 1)).transpose(-1, -2).flatten(2)  # the axes side by side
    still = angles.new_zeros(*angles.shape[:2], width // 2 - AXES * count)
    turned = torch.cat((still, angles), dim=-1)
    cos, sin = (table.to(places.device) for table in (turned.cos(), turned.sin()))
    return Rotary(cos=cos, sin=sin, pairing="interleaved")
