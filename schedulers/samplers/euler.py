"""Euler's method."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ..base import Noise, Point, Schedule, Slope, State, Step
from .common import begin, step_done


@dataclass(frozen=True, kw_only=True)
class Euler:
    """`x' = x + (sigma' - sigma) slope`. First order, one evaluation a step."""

    @property
    def name(self) -> str:
        """`euler`."""
        return "euler"

    def evaluations(self, schedule: Schedule) -> tuple[Point, ...]:
        """Every point but the last."""
        return schedule.points[:-1]

    def __call__(
        self, slope: Slope, x: Tensor, schedule: Schedule, noise: Noise, state: State | None = None
    ) -> Iterator[Step]:
        """See `Sampler`."""
        x, first, _ = begin(x, schedule, noise, state)
        for i, p, q in schedule.steps(first):
            d = slope(x, p)
            denoised = x - p.sigma * d
            x = x + (q.sigma - p.sigma) * d
            yield step_done(i, x, denoised, schedule, noise)
