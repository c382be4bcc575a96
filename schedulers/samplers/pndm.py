"""PNDM's linear multistep method (PLMS)."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ..base import Noise, Point, Schedule, Slope, State, Step
from .common import begin, step_done

NUM_HISTORY = 3


@dataclass(frozen=True, kw_only=True)
class PNDM:
    """`x' = x + (sigma' - sigma) (55 d - 59 d_1 + 37 d_2 - 9 d_3) / 24`, with the slopes of the last steps.

    Liu et al. 2022 (https://arxiv.org/abs/2202.09778) with Stable Diffusion's start (`skip_prk_steps`): the first step
    takes the mean of the slopes at both of its ends, the second (3 d - d_1) / 2, the third
    (23 d - 16 d_1 + 5 d_2) / 12. One evaluation a step, two in the first unless it is the only one, which is Euler's.
    The coefficients are those of equal steps, whatever the steps are: second order.
    """

    @property
    def name(self) -> str:
        """`pndm`."""
        return "pndm"

    def evaluations(self, schedule: Schedule) -> tuple[Point, ...]:
        """Every point but the last (the second is visited twice, at different latents)."""
        return schedule.points[:-1]

    def __call__(
        self, slope: Slope, x: Tensor, schedule: Schedule, noise: Noise, state: State | None = None
    ) -> Iterator[Step]:
        """See `Sampler`."""
        num_history = 0 if state is None else min(max(state.index, 1), NUM_HISTORY)
        x, first, history = begin(x, schedule, noise, state, num_history)
        for i, p, q in schedule.steps(first):
            h = q.sigma - p.sigma
            d = slope(x, p)
            denoised = x - p.sigma * d
            slopes = (d, *history)
            if i == 0 and schedule.num_steps > 1:
                x = x + h * ((d + slope(x + h * d, q)) / 2)
            else:
                x = x + h * extrapolated(slopes)
            history = slopes[:NUM_HISTORY]
            yield step_done(i, x, denoised, schedule, noise, history)


def extrapolated(d: tuple[Tensor, ...]) -> Tensor:
    """The mean slope of the step to come from those of the last ones, the newest first (Adams-Bashforth)."""
    if len(d) == 1:
        return d[0]
    if len(d) == 2:
        return (3 * d[0] - d[1]) / 2
    if len(d) == 3:
        return (23 * d[0] - 16 * d[1] + 5 * d[2]) / 12
    return (55 * d[0] - 59 * d[1] + 37 * d[2] - 9 * d[3]) / 24
