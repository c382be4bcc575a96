"""DDIM."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ..base import Noise, Point, Schedule, Slope, State, Step
from .common import begin, check_eta, step_done


@dataclass(frozen=True, kw_only=True)
class DDIM:
    """`x' = alpha' x0 + sqrt(sigma'^2 - up^2) eps + up noise`.

    Song et al. 2020 (https://arxiv.org/abs/2010.02502, equations 12 and 16), with
    `up = eta sigma' sqrt(1 - (alpha sigma' / (alpha' sigma))^2)`.
    `eta` in [0, 1] is the share of noise; 0 is Euler, bit for bit. The step to sigma 0 adds none.
    On the exploding path this is Euler-ancestral; on the flow path that one adds noise by another rule.

    Raises:
        ValueError: eta outside [0, 1].
    """

    eta: float = 0.0

    def __post_init__(self) -> None:
        """Check eta."""
        check_eta(self.eta)

    @property
    def name(self) -> str:
        """`ddim`."""
        return "ddim"

    def evaluations(self, schedule: Schedule) -> tuple[Point, ...]:
        """Every point but the last."""
        return schedule.points[:-1]

    def __call__(
        self, slope: Slope, x: Tensor, schedule: Schedule, noise: Noise, state: State | None = None
    ) -> Iterator[Step]:
        """See `Sampler`."""
        x, first, _ = begin(x, schedule, noise, state)
        for i, p, q in schedule.steps(first):
            up = self.eta * fresh_noise(p, q)
            down = math.sqrt(q.sigma**2 - up**2)
            d = slope(x, p)
            denoised = x - p.sigma * d
            x = x + (down - p.sigma) * d
            if up > 0.0:
                if schedule.path == "flow":  # Euler to `down` leaves alpha = 1 - down of x0
                    x = x + (down - q.sigma) * denoised
                x = x + up * noise(i).to(x.device)
            yield step_done(i, x, denoised, schedule, noise)


def fresh_noise(p: Point, q: Point) -> float:
    """The deviation of the noise that one step of the forward process adds between the points, seen from x0."""
    if q.sigma == 0.0:
        return 0.0
    return q.sigma * math.sqrt(max(1.0 - (p.alpha * q.sigma / (q.alpha * p.sigma)) ** 2, 0.0))
