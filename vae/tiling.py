"""Large pictures in overlapping tiles, blended linearly, so that a network's memory is that of one tile.

Legend: N rows, C channels and, in clips, frames, H W places of a grid whose cells are `unit` places a side.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Tiles of `size` latent cells a side; neighbours share at least `overlap` cells, over which they are blended.

    A network that sees a tile only takes its means and its attention from that tile, so the result differs a little
    from an untiled one: less so with larger tiles. Too small an overlap shows its borders: a quarter of the size is a
    good start. Raises ValueError unless 0 <= overlap < size.
    """

    size: int = 64
    overlap: int = 16

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.overlap < self.size:
            raise ValueError(
                f"tiles of size {self.size} cannot overlap by {self.overlap}: it takes 0 <= overlap < size"
            )

    def spans(self, length: int) -> tuple[Span, ...]:
        """The cells (start, stop) of each tile along a side of `length` cells, in order.

        As few as can be, all `size` long and spread evenly, so that an overlap may be larger than asked for; one tile
        where the side is no longer than that.
        """
        if length <= self.size:
            return ((0, length),)
        gaps = -((self.size - length) // (self.size - self.overlap))  # rounded up
        starts = (gap * (length - self.size) // gaps for gap in range(gaps + 1))
        return tuple((start, start + self.size) for start in starts)


@dataclass(frozen=True, kw_only=True)
class InParts:
    """How a network is run over pictures or clips: row by row with `slicing`, tile by tile with a `tiling`. Units are
    those of `tiled`."""

    tiling: Tiling | None
    slicing: bool
    unit_in: int
    unit_out: int

    def __call__(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """`run(x)`, part by part in an order that x's shape alone decides; the result of one part is that itself."""
        return torch.cat([self._row(run, row) for row in x.split(1)]) if self._rows(x) > 1 else self._row(run, x)

    def cut(self, x: Tensor) -> list[Tensor]:
        """The parts of x, in the order in which `run` gets them."""
        rows = [*x.split(1)] if self._rows(x) > 1 else [x]
        return rows if self.tiling is None else [tile for row in rows for tile in tiles(row, self.tiling, self.unit_in)]

    def count(self, x: Tensor) -> int:
        """How often `run` is called for x."""
        if self.tiling is None:
            return self._rows(x)
        rows, columns = (len(self.tiling.spans(side // self.unit_in)) for side in x.shape[-2:])
        return self._rows(x) * rows * columns

    def _rows(self, x: Tensor) -> int:
        return len(x) if self.slicing else 1

    def _row(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.tiling is None:
            return run(x)
        return tiled(run, x, self.tiling, unit_in=self.unit_in, unit_out=self.unit_out)


def tiles(x: Tensor, tiling: Tiling, unit: int) -> list[Tensor]:
    """The parts of x [N, C, ..., h * unit, w * unit], row by row."""
    rows, columns = (tiling.spans(side // unit) for side in x.shape[-2:])
    return [
        x[..., top * unit : bottom * unit, left * unit : right * unit]
        for top, bottom in rows
        for left, right in columns
    ]


def tiled(run: Callable[[Tensor], Tensor], x: Tensor, tiling: Tiling, *, unit_in: int, unit_out: int) -> Tensor:
    """`run(x)` tile by tile; a picture of one tile is `run(x)` itself, bit-equal.

    x [N, C, ..., h * unit_in, w * unit_in] gives [N, C', ..., h * unit_out, w * unit_out], as `run` does.
    """
    rows, columns = tiling.spans(x.shape[-2] // unit_in), tiling.spans(x.shape[-1] // unit_in)
    if len(rows) == len(columns) == 1:
        return run(x)
    down, across = blend_weights(_scaled(rows, unit_out)), blend_weights(_scaled(columns, unit_out))
    blended: Tensor | None = None
    for (top, bottom), weight_down in zip(rows, down, strict=True):
        for (left, right), weight_across in zip(columns, across, strict=True):
            inside = x[..., top * unit_in : bottom * unit_in, left * unit_in : right * unit_in]
            tile = run(inside)
            if blended is None:
                blended = tile.new_zeros((*tile.shape[:-2], rows[-1][1] * unit_out, columns[-1][1] * unit_out))
            weight = (weight_down[:, None] * weight_across).to(tile)
            place = blended[..., top * unit_out : bottom * unit_out, left * unit_out : right * unit_out]
            place.add_(tile * weight)
    assert blended is not None
    return blended


def blend_weights(spans: Sequence[Span]) -> tuple[Tensor, ...]:
    """How much each tile counts at each of its places: float64, 1 in all at every place.

    Linear from 0 at a border inside the picture to 1 where the neighbour ends.
    """
    before = (0, *(stop - start for (_, stop), (start, _) in pairwise(spans)))
    after = (*before[1:], 0)
    ramps = [_ramp(stop - start, *shared) for (start, stop), *shared in zip(spans, before, after, strict=True)]
    total = torch.zeros(spans[-1][1], dtype=torch.float64)
    for (start, stop), ramp in zip(spans, ramps, strict=True):
        total[start:stop] += ramp
    return tuple(ramp / total[start:stop] for (start, stop), ramp in zip(spans, ramps, strict=True))


def _ramp(length: int, before: int, after: int) -> Tensor:
    """Up over the first `before` places, down over the last `after`; 1 between, and where these are 0."""
    places = torch.arange(length, dtype=torch.float64) + 0.5
    up = places / before if before else torch.ones_like(places)
    down = (length - places) / after if after else torch.ones_like(places)
    return torch.minimum(up, down).clamp(max=1.0)


def _scaled(spans: Sequence[Span], unit: int) -> tuple[Span, ...]:
    return tuple((start * unit, stop * unit) for start, stop in spans)
