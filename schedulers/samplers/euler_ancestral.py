"""Euler's method with fresh noise in every step."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ..base import Noise, Path, Point, Schedule, Slope, State, Step
from .common import begin, check_eta, step_done


@dataclass(frozen=True, kw_only=True)
class EulerAncestral:
    """An Euler step to a sigma below the next one, then noise up to it.

    `x' = scale (x + (down - sigma) slope) + up noise`, see `ancestral_step`.
    `eta` in [0, 1] is the share of noise; 0 is Euler, bit for bit. The step to sigma 0 adds none.

    Raises:
        ValueError: eta outside [0, 1].
    """

    eta: float = 1.0

    def __post_init__(self) -> None:
        """Check eta."""
        check_eta(self.eta)

    @property
    def name(self) -> str:
        """`euler_ancestral`."""
        return "euler_ancestral"

    def evaluations(self, schedule: Schedule) -> tuple[Point, ...]:
        """Every point but the last."""
        return schedule.points[:-1]

    def __call__(
        self, slope: Slope, x: Tensor, schedule: Schedule, noise: Noise, state: State | None = None
    ) -> Iterator[Step]:
        """See `Sampler`."""
        x, first, _ = begin(x, schedule, noise, state)
        for i, p, q in schedule.steps(first):
            down, scale, up = ancestral_step(p, q, self.eta, schedule.path)
            d = slope(x, p)
            denoised = x - p.sigma * d
            x = scale * (x + (down - p.sigma) * d)
            if up > 0.0:
                x = x + up * noise(i).to(x.device)
            yield step_done(i, x, denoised, schedule, noise)


def ancestral_step(p: Point, q: Point, eta: float, path: Path) -> tuple[float, float, float]:
    """`(down, scale, up)` that end at the next point: `(scale down)^2 + up^2 = sigma'^2`, `scale alpha(down) = alpha'`.

    Exploding: `get_ancestral_step` of k-diffusion. Flow: ComfyUI's `sample_euler_ancestral_RF`.
    """
    if eta == 0.0 or q.sigma == 0.0:
        return q.sigma, 1.0, 0.0
    if path == "exploding":
        up = min(q.sigma, eta * q.sigma * math.sqrt(1.0 - (q.sigma / p.sigma) ** 2))
        return math.sqrt(q.sigma**2 - up**2), 1.0, up
    down = q.sigma * (1.0 + (q.sigma / p.sigma - 1.0) * eta)
    scale = q.alpha / (1.0 - down)
    return down, scale, math.sqrt(max(q.sigma**2 - (scale * down) ** 2, 0.0))
