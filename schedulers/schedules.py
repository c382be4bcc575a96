"""Ways to make a schedule, in plain floats.

Times are the sigmas; a family that tells its model something else replaces them.
"""

import math
from collections.abc import Sequence

from .base import Path, Point, Schedule, check_sigmas


def flow_schedule(num_steps: int, shift: float = 1.0) -> Schedule:
    """Sigmas 1, ..., 1/n in equal steps, then 0, each shifted by `shift_sigma`.

    Raises:
        ValueError: fewer than one step, or a shift that is not positive and finite.
    """
    _check_num_steps(num_steps)
    return flow_schedule_from_sigmas([(num_steps - i) / num_steps for i in range(num_steps)], shift)


def flow_schedule_from_sigmas(sigmas: Sequence[float], shift: float = 1.0) -> Schedule:
    """The given sigmas, strictly falling within 0..1, each shifted by `shift_sigma`; a missing final 0 is added.

    Raises:
        ValueError: a sigma that does not fall or leaves the range (named with its position), none above 0, a bad shift.
    """
    given = [float(sigma) for sigma in sigmas]
    check_sigmas(given, "flow")
    return _from_sigmas([shift_sigma(sigma, shift) for sigma in given], "flow")


def exploding_schedule(
    num_steps: int, sigma_min: float = 0.0292, sigma_max: float = 14.6146, rho: float = 7.0
) -> Schedule:
    """Equal steps in sigma^(1/rho), then 0: Karras et al. 2022 (https://arxiv.org/abs/2206.00364, equation 5).

    The defaults are the range of Stable Diffusion 1 and XL.

    Raises:
        ValueError: fewer than one step, not 0 < sigma_min < sigma_max, or rho not positive.
    """
    _check_num_steps(num_steps)
    if not 0.0 < sigma_min < sigma_max < math.inf:
        raise ValueError(f"need 0 < sigma_min < sigma_max, got {sigma_min:g} and {sigma_max:g}")
    if not 0.0 < rho < math.inf:
        raise ValueError(f"rho must be positive, got {rho:g}")
    low, high = sigma_min ** (1 / rho), sigma_max ** (1 / rho)
    ramp = [i / max(num_steps - 1, 1) for i in range(num_steps)]
    return _from_sigmas([(high + t * (low - high)) ** rho for t in ramp], "exploding")


def exploding_schedule_from_sigmas(sigmas: Sequence[float]) -> Schedule:
    """The given sigmas, strictly falling; a final 0 is added where it is missing.

    Raises:
        ValueError: sigmas that do not fall, are negative or not finite (named with their position), or none above 0.
    """
    return _from_sigmas([float(sigma) for sigma in sigmas], "exploding")


def shift_sigma(sigma: float, shift: float) -> float:
    """`s sigma / (1 + (s - 1) sigma)`: a shift s above 1 spends more of the steps at high noise; 1 changes nothing.

    Raises:
        ValueError: a shift that is not positive and finite.
    """
    if not 0.0 < shift < math.inf:
        raise ValueError(f"shift must be positive, got {shift:g}")
    return shift * sigma / (shift * sigma + (1.0 - sigma))  # written so that 0, 1 and a shift of 1 are exact


def exponential_shift_sigma(sigma: float, mu: float) -> float:
    """`e^mu / (e^mu + 1/sigma - 1)`, that is `shift_sigma` with s = e^mu: where mu comes from the size."""
    return shift_sigma(sigma, math.exp(mu))


def _from_sigmas(sigmas: list[float], path: Path) -> Schedule:
    if not sigmas or sigmas == [0.0]:
        raise ValueError(f"a schedule needs at least one sigma above 0, got {sigmas}")
    if sigmas[-1] != 0.0:
        sigmas = [*sigmas, 0.0]
    alphas = [1.0 - sigma if path == "flow" else 1.0 for sigma in sigmas]
    pairs = zip(sigmas, alphas, strict=True)
    return Schedule(points=tuple(Point(index=i, sigma=s, alpha=a, time=s) for i, (s, a) in enumerate(pairs)), path=path)


def _check_num_steps(num_steps: int) -> None:
    if num_steps < 1:
        raise ValueError(f"the number of steps must be at least 1, got {num_steps}")
