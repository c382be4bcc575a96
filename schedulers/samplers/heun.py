"""Heun's method."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ..base import Noise, Point, Schedule, Slope, State, Step
from .common import begin, step_done


@dataclass(frozen=True, kw_only=True)
class Heun:
    """An Euler step, then the step again with the mean of the slopes at both ends.

    Second order, two evaluations a step. The step to sigma 0 stays Euler's, as in Karras et al. 2022
    (https://arxiv.org/abs/2206.00364, algorithm 1): there is no slope at sigma 0.
    """

    @property
    def name(self) -> str:
        """`heun`."""
        return "heun"

    def evaluations(self, schedule: Schedule) -> tuple[Point, ...]:
        """Every point with sigma above 0 (inner points are visited twice, at different latents)."""
        return tuple(point for point in schedule.points if point.sigma > 0.0)

    def __call__(
        self, slope: Slope, x: Tensor, schedule: Schedule, noise: Noise, state: State | None = None
    ) -> Iterator[Step]:
        """See `Sampler`."""
        x, first, _ = begin(x, schedule, noise, state)
        for i, p, q in schedule.steps(first):
            h = q.sigma - p.sigma
            d = slope(x, p)
            denoised = x - p.sigma * d
            if q.sigma > 0.0:
                d = (d + slope(x + h * d, q)) / 2
            x = x + h * d
            yield step_done(i, x, denoised, schedule, noise)
