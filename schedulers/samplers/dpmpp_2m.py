"""DPM-Solver++ (2M)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ..base import Noise, Point, Schedule, Slope, State, Step
from .common import begin, step_done


@dataclass(frozen=True, kw_only=True)
class DPMPP2M:
    """DPM-Solver++ (2M). Second order, one evaluation a step.

    Lu et al. 2022 (https://arxiv.org/abs/2211.01095, algorithm 2).
    With lambda = log(alpha / sigma) and h = lambda' - lambda,
    `x' = (sigma' / sigma) x + alpha' (1 - e^-h) x0`, `x0 = denoised + h / (2 h_last) (denoised - denoised_last)`.
    The first step and the one to sigma 0 use x0 = denoised; so does the one after sigma = 1 on the flow path, where
    h_last is infinite.
    """

    @property
    def name(self) -> str:
        """`dpmpp_2m`."""
        return "dpmpp_2m"

    def evaluations(self, schedule: Schedule) -> tuple[Point, ...]:
        """Every point but the last."""
        return schedule.points[:-1]

    def __call__(
        self, slope: Slope, x: Tensor, schedule: Schedule, noise: Noise, state: State | None = None
    ) -> Iterator[Step]:
        """See `Sampler`."""
        x, first, history = begin(x, schedule, noise, state, num_history=1)
        for i, p, q in schedule.steps(first):
            denoised = x - p.sigma * slope(x, p)
            x0 = denoised
            if history and q.sigma > 0.0:
                h, h_last = log_snr(q) - log_snr(p), log_snr(p) - log_snr(schedule.points[i - 1])
                x0 = denoised + h / (2 * h_last) * (denoised - history[0])
            # alpha' (1 - e^-h) = alpha' - alpha sigma' / sigma, which has no infinity at alpha = 0 or sigma' = 0
            ratio = q.sigma / p.sigma
            # x + (ratio - 1) x, not ratio x: rounding a factor near 1 to float32 is an error that many steps add up
            x = x + (ratio - 1) * x + (q.alpha - p.alpha * ratio) * x0
            history = (denoised,)
            yield step_done(i, x, denoised, schedule, noise, history)


def log_snr(point: Point) -> float:
    """`log(alpha / sigma)`; minus infinity at alpha = 0. Not defined at sigma = 0."""
    return math.log(point.alpha / point.sigma) if point.alpha > 0.0 else -math.inf
