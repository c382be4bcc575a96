"""Rotary position embedding over any number of axes (Su et al. 2021).

Legend: B rows, L tokens, H heads, A axes, Dh width of one head (the sum of the axes' widths).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Pairing = Literal["interleaved", "half"]


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """Widths per axis, base, how channels pair up, and the dtype that the tables are built in.

    Pair n of an axis of width w turns by position * theta^(-2n / w). "interleaved" pairs neighbours, "half" the first
    half of the head with the second.
    """

    axes: tuple[int, ...]
    theta: float = 10000.0
    pairing: Pairing = "interleaved"
    dtype: Literal["float32", "float64"] = "float32"

    def __post_init__(self) -> None:
        if not self.axes or any(width < 2 or width % 2 for width in self.axes):
            raise ValueError(f"rotary axes are {self.axes}; there must be one at least, each of an even width")
        if self.theta <= 0:
            raise ValueError(f"rotary theta is {self.theta}; it must be more than 0")


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Cosines and sines for each token: float32 [B or 1, L, Dh / 2]."""

    cos: Tensor
    sin: Tensor
    pairing: Pairing


def rotary_table(config: RotaryConfig, positions: Tensor) -> Rotary:
    """Tables for `positions` [B, L, A] or [L, A] (any real dtype).

    They are built on the CPU in the config's dtype, so that every device gets the same numbers, then go to the
    positions' device.

    Raises:
        ValueError: the positions have another number of axes.
    """
    dtype = torch.float64 if config.dtype == "float64" else torch.float32
    if positions.dim() == 2:
        positions = positions[None]
    if positions.shape[-1] != len(config.axes):
        raise ValueError(f"positions have {positions.shape[-1]} axes; the rotary embedding has {len(config.axes)}")
    on_host = positions.to("cpu", dtype)
    angles = torch.cat([_angles(on_host[..., n], width, config.theta) for n, width in enumerate(config.axes)], dim=-1)
    cos, sin = (table.to(positions.device, torch.float32) for table in (angles.cos(), angles.sin()))
    return Rotary(cos=cos, sin=sin, pairing=config.pairing)


def _angles(positions: Tensor, width: int, theta: float) -> Tensor:
    exponents = torch.arange(0, width, 2, dtype=positions.dtype) / width
    return positions[..., None] * (1.0 / theta**exponents)


def apply_rotary(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate queries or keys [B, H, L, Dh]; computed in float32, returned in `x`'s dtype.

    Raises:
        ValueError: the tables are made for heads of another width.
    """
    if x.shape[-1] != 2 * rotary.cos.shape[-1]:
        raise ValueError(f"the heads are {x.shape[-1]} wide; the rotary tables are made for {2 * rotary.cos.shape[-1]}")
    cos, sin = rotary.cos[:, None], rotary.sin[:, None]
    if rotary.pairing == "half":
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    pairs = x.float().unflatten(-1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)


def grid_positions(sizes: Sequence[int], *, start: Sequence[int] | None = None) -> Tensor:
    """Positions of a dense grid, row-major, [product of sizes, A] int64; `start` shifts each axis."""
    offsets = start if start is not None else (0,) * len(sizes)
    axes = [torch.arange(size) + offset for size, offset in zip(sizes, offsets, strict=True)]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)
