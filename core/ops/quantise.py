"""Weights to few bits and back: 8 bits with a scale per row, 4 bits with a scale and a middle per group of inputs.

Legend: N rows (outputs), K inputs, G groups (K / 32), R rows at a time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

GROUP = 32
_LEVELS = 15  # steps between the 16 values of 4 bits
_CHUNK_WEIGHTS = 1 << 20
_SAMPLED_GROUPS = 256
_ON_GRID = 1e-3  # the largest distance from a grid, in steps, that counts as rounding


@dataclass(frozen=True, kw_only=True)
class Quantised:
    """Whole numbers [N, K] (int8, or 0 to 15 in uint8), what scales them, and ||W - W'|| / ||W||."""

    numbers: Tensor
    scales: Tensor
    error: float


def quantise_int8(weight: Tensor, dtype: torch.dtype = torch.bfloat16) -> Quantised:
    """Each row to -127..127 times its scale; `scales` [N] of `dtype`."""
    return _by_rows(weight, dtype, lambda w: w.abs().amax(dim=1))


def quantise_w8a8(weight: Tensor) -> Quantised:
    """As `quantise_int8`, with float32 scales so large that two neighbours of one sign add up to 128 at most.

    Kernels without wider sums add the products of two neighbours with activations of up to 255 in 16 bits, where 32767
    is the largest number.
    """
    return _by_rows(weight, torch.float32, _largest_pair)


def _by_rows(weight: Tensor, dtype: torch.dtype, reach: Callable[[Tensor], Tensor]) -> Quantised:
    """Rows of numbers, of which 127 stands for `reach(w)` [R] of rows `w` [R, K]."""
    numbers = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(weight), dtype=dtype, device=weight.device)
    error = _Error()
    for rows in _row_chunks(weight):
        w = weight[rows].float()
        scales[rows] = (reach(w) / 127).to(dtype)
        step = scales[rows].float()
        numbers[rows] = (w / _no_zero(step)[:, None]).round().clamp(-127, 127).to(torch.int8)
        error.add(w, values_int8(numbers[rows], scales[rows], torch.float32))
    return Quantised(numbers=numbers, scales=scales, error=error.relative)


def _largest_pair(w: Tensor) -> Tensor:
    """The largest |a + b| of neighbours a, b of one sign, or |a| alone, in each row of [R, K]."""
    pairs = functional.pad(w, (0, w.shape[1] % 2)).unflatten(1, (-1, 2))
    sums = torch.maximum(pairs.clamp(min=0).sum(-1), pairs.clamp(max=0).sum(-1).neg())
    return sums.amax(dim=1)


def values_int8(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights [N, K] that `quantise_int8` gave."""
    return numbers.to(dtype) * scales.to(dtype)[:, None]


def quantise_int4(weight: Tensor, dtype: torch.dtype = torch.bfloat16) -> Quantised:
    """Each group of 32 to (number - 8) * scale + middle; `scales` [G, N, 2] of `dtype` holds both.

    Groups that lie on a grid of at most 16 values, as those read from Q4_0, Q4_1 and Q4_K files do, keep it: only the
    rounding of scale and middle to `dtype` remains.

    Raises:
        ValueError: the number of inputs is not a multiple of 32.
    """
    if weight.shape[1] % GROUP:
        raise ValueError(f"a weight with {weight.shape[1]} inputs has no groups of {GROUP}")
    numbers = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(weight.shape[1] // GROUP, len(weight), 2, dtype=dtype, device=weight.device)
    has_grids = _has_grids(weight)
    error = _Error()
    for rows in _row_chunks(weight):
        w = weight[rows].float()
        groups = w.view(-1, GROUP)
        step, middle = (x.to(dtype) for x in _grid(groups, search=has_grids))
        q = ((groups - middle.float()) / _no_zero(step.float())).round_().add_(8).clamp_(0, _LEVELS)
        numbers[rows] = q.view_as(w).to(torch.uint8)
        scales[:, rows] = torch.cat((step, middle), dim=1).view(len(w), -1, 2).transpose(0, 1)
        error.add(w, values_int4(numbers[rows], scales[:, rows], torch.float32))
    return Quantised(numbers=numbers, scales=scales, error=error.relative)


def values_int4(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights [N, K] that `quantise_int4` gave."""
    step, middle = scales.to(dtype).transpose(0, 1).unbind(-1)
    groups = (numbers.view(len(numbers), -1, GROUP).to(dtype) - 8) * step[..., None] + middle[..., None]
    return groups.view(numbers.shape)


def _grid(groups: Tensor, *, search: bool) -> tuple[Tensor, Tensor]:
    """Step and middle (of number 8) for each of [R, 32], both [R, 1]."""
    low, high = groups.amin(dim=1, keepdim=True), groups.amax(dim=1, keepdim=True)
    step = (high - low) / _LEVELS
    if search:
        open_ = (~_fits(groups, low, step)).nonzero()[:, 0]
        for levels in range(_LEVELS - 1, 0, -1):
            if not len(open_):
                break
            finer = (high - low)[open_] / levels
            fits = _fits(groups[open_], low[open_], finer)
            step[open_[fits]] = finer[fits]
            open_ = open_[~fits]
    return step, low + 8 * step


def _fits(groups: Tensor, low: Tensor, step: Tensor) -> Tensor:
    """Which groups lie on low + n * step, [R] bool."""
    places = (groups - low) / _no_zero(step)
    return (places - places.round()).abs().amax(dim=1) < _ON_GRID


def _has_grids(weight: Tensor) -> bool:
    """Whether at least half of some groups lie on grids, so that it is worth to look for them."""
    groups = weight.reshape(-1, GROUP)
    sample = groups[:: max(1, len(groups) // _SAMPLED_GROUPS)].float()
    step, _ = _grid(sample, search=True)
    return bool(_fits(sample, sample.amin(dim=1, keepdim=True), step).float().mean() >= 0.5)


def _no_zero(step: Tensor) -> Tensor:
    return torch.where(step == 0, torch.ones_like(step), step)


def _row_chunks(weight: Tensor) -> Iterator[slice]:
    count = max(1, _CHUNK_WEIGHTS // weight.shape[1])
    for start in range(0, len(weight), count):
        yield slice(start, min(start + count, len(weight)))


class _Error:
    """||W - W'|| / ||W||, chunk by chunk."""

    def __init__(self) -> None:
        self._difference = 0.0
        self._whole = 0.0

    def add(self, wanted: Tensor, found: Tensor) -> None:
        self._difference += float((wanted - found).double().square().sum())
        self._whole += float(wanted.double().square().sum())

    @property
    def relative(self) -> float:
        return (self._difference / self._whole) ** 0.5 if self._whole else 0.0
