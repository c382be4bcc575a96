"""Latent consistency models: jump to x0, then noise again."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ..base import Noise, Point, Schedule, Slope, State, Step
from .common import begin, step_done

SIGMA_DATA = 0.5


@dataclass(frozen=True, kw_only=True)
class LCM:
    """`x' = alpha' x0 + sigma' noise`, for few-step models. The step to sigma 0 adds none.

    Luo et al. 2023 (https://arxiv.org/abs/2310.04378). With `timestep_scaling` (10 in LCM's own checkpoints), x0 is
    mixed with x as their consistency function is, `x0 <- c_out x0 + c_skip x_vp` with s = timestep_scaling t,
    `c_skip = 0.25 / (s^2 + 0.25)`, `c_out = s / sqrt(s^2 + 0.25)`: next to nothing but at the lowest timesteps t.

    Raises:
        ValueError: a timestep_scaling that is not positive; when run, one on the flow path, which has no timesteps.
    """

    timestep_scaling: float | None = None

    def __post_init__(self) -> None:
        """Check the scaling."""
        if self.timestep_scaling is not None and not 0.0 < self.timestep_scaling < math.inf:
            raise ValueError(f"timestep_scaling must be positive, got {self.timestep_scaling:g}")

    @property
    def name(self) -> str:
        """`lcm`."""
        return "lcm"

    def evaluations(self, schedule: Schedule) -> tuple[Point, ...]:
        """Every point but the last."""
        return schedule.points[:-1]

    def __call__(
        self, slope: Slope, x: Tensor, schedule: Schedule, noise: Noise, state: State | None = None
    ) -> Iterator[Step]:
        """See `Sampler`."""
        if self.timestep_scaling is not None and schedule.path == "flow":
            raise ValueError("timestep_scaling belongs to the exploding path, this schedule is on the flow path")
        x, first, _ = begin(x, schedule, noise, state)
        for i, p, q in schedule.steps(first):
            denoised = x - p.sigma * slope(x, p)
            if self.timestep_scaling is not None:
                denoised = boundary(denoised, x, p, self.timestep_scaling)
            x = denoised
            if q.sigma > 0.0:
                x = q.alpha * denoised + q.sigma * noise(i).to(x.device)
            yield step_done(i, x, denoised, schedule, noise)


def boundary(x0: Tensor, x: Tensor, p: Point, scaling: float) -> Tensor:
    """The consistency function: x itself at timestep 0. Its x is x_vp, ours over sqrt(1 + sigma^2)."""
    s = scaling * p.time
    c_skip = SIGMA_DATA**2 / (s**2 + SIGMA_DATA**2)
    c_out = s / math.sqrt(s**2 + SIGMA_DATA**2)
    return c_out * x0 + (c_skip / math.sqrt(1.0 + p.sigma**2)) * x
