"""Which training timesteps a DDPM-type scheduler visits: diffusers' rules, one function per rule.

Each takes the number of training timesteps N and of steps n and returns falling timesteps in 0..N - 1.
"""

import math
from typing import Literal

from .spacing import even, to_float32

Spacing = Literal["linspace", "leading", "trailing"]


def euler_timesteps(spacing: Spacing, count: int, num_steps: int, offset: int) -> list[float]:
    """Euler's and Euler-ancestral's: whole, but for `linspace`, which divides 0..N - 1 evenly."""
    if spacing == "linspace":
        return to_float32(even(0.0, count - 1.0, num_steps))[::-1]
    return whole_timesteps(spacing, count, num_steps, offset)


def whole_timesteps(spacing: Spacing, count: int, num_steps: int, offset: int) -> list[float]:
    """DDIM's and PNDM's: the same, rounded."""
    if spacing == "linspace":
        return [float(round(t)) for t in even(0.0, count - 1.0, num_steps)][::-1]
    if spacing == "leading":
        return [float(i * (count // num_steps) + offset) for i in reversed(range(num_steps))]
    return _trailing(count, count, num_steps, num_steps)


def dpm_timesteps(spacing: Spacing, count: int, num_steps: int, offset: int, last: int) -> list[float]:
    """DPM-Solver's: one more point than steps, without the lowest; only the first `last` training timesteps count."""
    if spacing == "linspace":
        return [float(round(t)) for t in even(0.0, last - 1.0, num_steps + 1)][:0:-1]
    if spacing == "leading":
        return [float(i * (last // (num_steps + 1)) + offset) for i in range(num_steps, 0, -1)]
    kept = num_steps if last == count else math.ceil(last / (count / num_steps))
    return _trailing(count, last, num_steps, kept)


def lcm_timesteps(count: int, num_steps: int, num_original: int) -> list[float]:
    """LCM's: evenly chosen ones of the `num_original` at which the model was distilled.

    Raises:
        ValueError: more steps than that, or more of those than training timesteps.
    """
    if not 1 <= num_original <= count:
        raise ValueError(f"original_inference_steps must lie in 1..{count}, got {num_original}")
    if num_steps > num_original:
        raise ValueError(f"{num_steps} steps are more than the {num_original} this model was distilled at")
    distilled = [i * (count // num_original) - 1 for i in range(num_original, 0, -1)]
    return [float(distilled[math.floor(i * (num_original / num_steps))]) for i in range(num_steps)]


def _trailing(count: int, first: int, num_steps: int, kept: int) -> list[float]:
    step = (first - count / num_steps) - first  # as `numpy.arange` rounds it: ties of `round` depend on it
    return [float(round(first + i * step) - 1) for i in range(kept)]
