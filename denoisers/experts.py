"""Two denoisers that share a run: one where the noise is strong, one where it is weak (Wan 2.2).

Legend: B rows, C latent channels, F frames, h w latent cells.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from ..core.attention.base import AttentionSelector
from ..core.stream import Runner, run_blocks
from ..schedulers.base import Point, Slope
from .base import Conditioning, Denoiser, P, Prompt
from .embedding import TIME_SCALE
from .guidance import Guidance, Run, prepare_both
from .hoisting import HoistingModule


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertsPrepared(Generic[P]):
    """Of each expert that the run asks, by a point's index: that expert, and what it prepared for all of its points."""

    turns: Mapping[int, tuple[Denoiser[P], P]]


@dataclass(frozen=True, kw_only=True)
class Experts(Generic[P]):
    """`high` while the time is at least `boundary`, from 0 to 1, then `low`; implements `Denoiser` and
    `PairingDenoiser`. An expert that no point asks for prepares nothing."""

    high: Denoiser[P]
    low: Denoiser[P]
    boundary: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.boundary <= 1.0:
            raise ValueError(f"the experts' boundary is {self.boundary}; it must be from 0 to 1")

    def prepare(
        self,
        conditioning: Conditioning,
        shape: tuple[int, ...],
        evaluations: Sequence[Point],
        *,
        attention: AttentionSelector,
        runner: Runner = run_blocks,
    ) -> ExpertsPrepared[P]:
        """Everything for latents of `shape` [B, C, F, h, w] at these points, each of its own expert.

        Raises:
            ValueError: as the experts do.
        """
        run = Run(shape=shape, evaluations=evaluations, attention=attention, runner=runner)
        turns: dict[int, tuple[Denoiser[P], P]] = {}
        for expert, its in self._runs(run):
            prepared = expert.prepare(conditioning, shape, its.evaluations, attention=attention, runner=its.runner)
            turns |= {point.index: (expert, prepared) for point in its.evaluations}
        return ExpertsPrepared(turns=turns)

    def prepare_both(
        self,
        first: Conditioning,
        second: Conditioning,
        shape: tuple[int, ...],
        evaluations: Sequence[Point],
        *,
        attention: AttentionSelector,
        runner: Runner = run_blocks,
    ) -> tuple[ExpertsPrepared[P], ExpertsPrepared[P]]:
        """See `PairingDenoiser`: as far as each expert shares what it prepares."""
        run = Run(shape=shape, evaluations=evaluations, attention=attention, runner=runner)
        one: dict[int, tuple[Denoiser[P], P]] = {}
        other: dict[int, tuple[Denoiser[P], P]] = {}
        for expert, its in self._runs(run):
            both = prepare_both(expert, first, second, its)
            one |= {point.index: (expert, both[0]) for point in its.evaluations}
            other |= {point.index: (expert, both[1]) for point in its.evaluations}
        return ExpertsPrepared(turns=one), ExpertsPrepared(turns=other)

    def slope(self, x: Tensor, prepared: ExpertsPrepared[P], point: Point) -> Tensor:
        """That of the point's expert, float32 [B, C, F, h, w]."""
        expert, its_own = prepared.turns[point.index]
        return expert.slope(x, its_own, point)

    def _runs(self, run: Run) -> Iterator[tuple[Denoiser[P], Run]]:
        """Each expert that has a turn, and its own part of a run."""
        for expert in (self.high, self.low):
            points = [point for point in run.evaluations if self.expert(point) is expert]
            if points:
                own = expert.runner(run.runner) if isinstance(expert, HoistingModule) else run.runner
                yield expert, dataclasses.replace(run, evaluations=points, runner=own)

    def expert(self, point: Point) -> Denoiser[P]:
        """Whose turn it is at `point`."""
        return self.high if is_at_least(point, self.boundary) else self.low


@dataclass(frozen=True)
class PerExpert:
    """Guidance that changes with the expert: `high` while the time is at least `boundary`, then `low`."""

    high: Guidance
    low: Guidance
    boundary: float

    @property
    def needs_negative(self) -> bool:
        """Where one of the two does."""
        return self.high.needs_negative or self.low.needs_negative

    def bind(self, denoiser: Denoiser[P], prompt: Prompt, run: Run) -> Slope:
        """At each point the slope of its guidance, which prepares its own points alone."""
        turns: dict[int, Slope] = {}
        for guidance, is_high in ((self.high, True), (self.low, False)):
            points = [point for point in run.evaluations if is_at_least(point, self.boundary) is is_high]
            if points:
                slope = guidance.bind(denoiser, prompt, dataclasses.replace(run, evaluations=points))
                turns |= {point.index: slope for point in points}
        return lambda x, point: turns[point.index](x, point)


def is_at_least(point: Point, boundary: float) -> bool:
    """Whether it is the turn of the expert for strong noise."""
    return _clock(point.time) >= _clock(boundary)


def _clock(time: float) -> float:
    """1000 times a time, rounded to float32: pipelines compare such numbers, and their last bit decides at the
    boundary itself."""
    return float(torch.tensor(TIME_SCALE * time, dtype=torch.float32))
