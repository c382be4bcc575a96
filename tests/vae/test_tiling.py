"""Tiles cover a picture, and their borders are not seen."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from calotype.vae.tiling import Tiling, blend_weights, tiled

UNIT = 4


def decoder(cells: Tensor) -> Tensor:
    """Smooth, but for what a tile does not know of the rest: its mean, and what lies beyond its borders."""
    mean = cells.mean((-2, -1), keepdim=True)
    spread = functional.avg_pool2d(cells, 3, stride=1, padding=1, count_include_pad=False)
    return functional.interpolate(spread + 0.3 * mean, scale_factor=UNIT, mode="bicubic", align_corners=True)


def smooth(height: int, width: int) -> Tensor:
    down, across = torch.linspace(0, 1, height)[:, None], torch.linspace(0, 4, width)[None]
    return torch.stack((across + down, across + torch.sin(across) * down))[None]


def jumps(pictures: Tensor, borders: set[int]) -> tuple[float, float]:
    """The largest difference of neighbouring columns across a border, and elsewhere."""
    steps = pictures.diff(dim=-1).abs().amax((0, 1, 2))
    across = torch.tensor([place + 1 in borders for place in range(len(steps))])
    return steps[across].max().item(), steps[~across].max().item()


@pytest.mark.parametrize("overlap", range(6))
def test_tiles_cover_every_cell_and_overlap(overlap: int) -> None:
    for size in range(overlap + 1, 12):
        tiling = Tiling(size=size, overlap=overlap)
        for length in range(1, 45):
            spans = tiling.spans(length)
            assert spans[0][0] == 0 and spans[-1][1] == length
            assert all(stop - start == min(size, length) for start, stop in spans)
            shared = [before[1] - after[0] for before, after in pairwise(spans)]
            assert min(shared, default=overlap) >= overlap
            assert max(shared, default=0) - min(shared, default=0) <= 1, "the tiles are spread evenly"
            fewer = (len(spans) - 1) * (size - overlap) + overlap  # what one tile less can cover
            assert len(spans) == 1 or fewer < length


def test_known_tiles() -> None:
    assert Tiling(size=8, overlap=2).spans(8) == ((0, 8),)
    assert Tiling(size=8, overlap=2).spans(3) == ((0, 3),)
    assert Tiling(size=8, overlap=2).spans(14) == ((0, 8), (6, 14))
    assert Tiling(size=8, overlap=2).spans(15) == ((0, 8), (3, 11), (7, 15))


@pytest.mark.parametrize(("size", "overlap"), [(0, 0), (4, 4), (4, -1)])
def test_impossible_tiles(size: int, overlap: int) -> None:
    with pytest.raises(ValueError, match=f"size {size} cannot overlap by {overlap}"):
        Tiling(size=size, overlap=overlap)


@pytest.mark.parametrize(("size", "overlap", "length"), [(8, 2, 14), (8, 2, 15), (8, 6, 21), (5, 0, 13), (9, 3, 10)])
def test_weights_are_one_in_all_and_linear(size: int, overlap: int, length: int) -> None:
    spans = Tiling(size=size, overlap=overlap).spans(length)
    total = torch.zeros(length, dtype=torch.float64)
    for (start, stop), weights in zip(spans, blend_weights(spans), strict=True):
        assert weights.min() > 0
        total[start:stop] += weights
    torch.testing.assert_close(total, torch.ones_like(total))
    if (size, length) == (8, 14):
        assert blend_weights(spans)[0].tolist() == [1, 1, 1, 1, 1, 1, 0.75, 0.25]
        assert blend_weights(spans)[1].tolist() == [0.25, 0.75, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("shape", [(13, 30), (30, 9), (21, 22)])
def test_a_local_network_is_not_changed(shape: tuple[int, int]) -> None:
    """Up and down in size, odd sides, three tiles over one place."""
    cells = torch.randn(2, 2, *shape, dtype=torch.float64)
    tiling = Tiling(size=8, overlap=5)

    def enlarged(x: Tensor) -> Tensor:
        return 3 * functional.interpolate(x, scale_factor=UNIT)

    large = tiled(enlarged, cells, tiling, unit_in=1, unit_out=UNIT)
    torch.testing.assert_close(large, enlarged(cells))
    small = tiled(lambda x: functional.avg_pool2d(x, UNIT), large, tiling, unit_in=UNIT, unit_out=1)
    torch.testing.assert_close(small, 3 * cells)


def test_borders_are_not_seen() -> None:
    cells, tiling = smooth(14, 40), Tiling(size=16, overlap=4)
    borders = {place * UNIT for span in tiling.spans(40) for place in span} - {0, 40 * UNIT}
    picture = tiled(decoder, cells, tiling, unit_in=1, unit_out=UNIT)
    across, elsewhere = jumps(picture, borders)
    assert across <= 1.5 * elsewhere
    hard = Tiling(size=20, overlap=0)
    seams = {place * UNIT for span in hard.spans(40) for place in span} - {0, 40 * UNIT}
    across, elsewhere = jumps(tiled(decoder, cells, hard, unit_in=1, unit_out=UNIT), seams)
    assert across > 10 * elsewhere, "without an overlap they are"


@pytest.mark.parametrize("size", [14, 15, 100])
def test_one_tile_is_no_tiling(size: int) -> None:
    cells = torch.randn(1, 2, 14, 12)
    assert torch.equal(tiled(decoder, cells, Tiling(size=size, overlap=3), unit_in=1, unit_out=UNIT), decoder(cells))
