"""UniPC."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..base import Noise, Point, Schedule, Slope, State, Step
from .common import begin, step_done

LEAST_ALPHA = 17 * 2.0**-24  # what is left of 1 - (1 - 1e-6) in float32


@dataclass(frozen=True, kw_only=True)
class UniPC:
    """A multistep predictor, whose result the next step corrects with what the model says there. One evaluation a step.

    Zhao et al. 2023 (https://arxiv.org/abs/2302.04867, algorithms 5 to 8, with B(h) = e^h - 1, "bh2"), on predictions m
    of x0. With lambda = log(alpha / sigma), h = lambda' - lambda and r_k = (lambda_k - lambda) / h,
    `x' = (sigma' / sigma) x + alpha' (1 - e^-h) (m + sum_k rho_k (m_k - m) / r_k)`
    over `order` - 1 earlier points; the correction also takes the end of the step, where r = 1. The first steps know
    fewer points, and the last ones to sigma 0 take fewer, down to one. What a step yields is not corrected yet.

    Order 2 converges as h^3. At sigma = 1 on the flow path lambda is infinite: that of 1 - 1e-6 stands for it, as in
    diffusers.

    Raises:
        ValueError: an order below 1.
    """

    order: int = 2

    def __post_init__(self) -> None:
        """Check the order."""
        if self.order < 1:
            raise ValueError(f"the order must be at least 1, got {self.order}")

    @property
    def name(self) -> str:
        """`unipc`."""
        return "unipc"

    def evaluations(self, schedule: Schedule) -> tuple[Point, ...]:
        """Every point but the last."""
        return schedule.points[:-1]

    def __call__(
        self, slope: Slope, x: Tensor, schedule: Schedule, noise: Noise, state: State | None = None
    ) -> Iterator[Step]:
        """See `Sampler`. The history is where the last step began, corrected, and the last predictions of x0."""
        num_history = 0 if state is None else 1 + min(state.index, self.order)
        x, first, history = begin(x, schedule, noise, state, num_history)
        for i, p, _ in schedule.steps(first):
            denoised = x - p.sigma * slope(x, p)
            if history:
                x = self._stepped(schedule, i - 1, history[0], history[1:], denoised)
            known = (denoised, *history[1:])[: self.order]
            history = (x, *known)
            x = self._stepped(schedule, i, x, known)
            yield step_done(i, x, denoised, schedule, noise, history)

    def _stepped(
        self, schedule: Schedule, i: int, x: Tensor, known: Sequence[Tensor], end: Tensor | None = None
    ) -> Tensor:
        """Step i from x, with the x0 `known` at its start and before, newest first, and perhaps at its end."""
        p, q = schedule.points[i], schedule.points[i + 1]
        used = known[: self._order(schedule, i)]
        x0, points, others = used[0], [schedule.points[i - k] for k in range(1, len(used))], [*used[1:]]
        if end is not None:
            points, others = [*points, q], [*others, end]
        for weight, other in zip(weights(p, q, points), others, strict=True):
            x0 = x0 + weight * (other - used[0])
        # alpha' (1 - e^-h) = alpha' - alpha sigma' / sigma, which has no infinity at alpha = 0 or sigma' = 0
        ratio = q.sigma / p.sigma
        return x + (ratio - 1) * x + (q.alpha - p.alpha * ratio) * x0

    def _order(self, schedule: Schedule, i: int) -> int:
        """How many predictions step i uses at most."""
        return min(self.order, schedule.num_steps - i) if schedule.points[-1].sigma == 0.0 else self.order


def weights(p: Point, q: Point, others: Sequence[Point]) -> list[float]:
    """`rho_k / r_k` for each of the `others`, in a step from p to q.

    The rho solve `sum_k rho_k r_k^(n-1) = n! phi_(n+1)(-h) (-h)^n / (e^-h - 1)` for n = 1, 2, ...; a single one is 1/2.
    """
    if not others:
        return []
    h = _log_snr(q) - _log_snr(p)
    r = [(_log_snr(other) - _log_snr(p)) / h for other in others]
    if len(r) == 1:
        return [0.5 / r[0]]
    rows = [[each**n for each in r] for n in range(len(r))]
    rho = torch.linalg.solve(torch.tensor(rows, dtype=torch.float64), _right_side(-h, len(r)))
    return [weight / each for weight, each in zip(rho.tolist(), r, strict=True)]


def _right_side(h: float, count: int) -> Tensor:
    """[count] float64; `phi` is h^n phi_(n+1)(h), by its recursion."""
    sides: list[float] = []
    phi = math.expm1(h)
    for n in range(1, count + 1):
        phi = phi / h - 1.0 / math.factorial(n)
        sides.append(phi * math.factorial(n) / math.expm1(h))
    return torch.tensor(sides, dtype=torch.float64)


def _log_snr(point: Point) -> float:
    return math.log(max(point.alpha, LEAST_ALPHA) / point.sigma)
