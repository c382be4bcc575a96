"""Rows of numbers as numpy and k-diffusion make them, in plain floats."""

import math
from collections.abc import Sequence
from typing import Literal

import torch

Spread = Literal["karras", "exponential"]

RHO = 7.0  # Karras et al. 2022 (https://arxiv.org/abs/2206.00364)


def even(first: float, last: float, count: int) -> list[float]:
    """`count` numbers in equal steps from `first` to `last`, with the rounding of `numpy.linspace`; one is `first`."""
    if count == 1:
        return [first]
    step = (last - first) / (count - 1)
    return [i * step + first for i in range(count - 1)] + [last]


def spread_out(spread: Spread, highest: float, lowest: float, count: int) -> list[float]:
    """`count` sigmas from `highest` to `lowest`, in equal steps of sigma^(1/7) (karras) or log sigma (exponential)."""
    if spread == "exponential":
        return [math.exp(level) for level in even(math.log(highest), math.log(lowest), count)]
    low, high = lowest ** (1 / RHO), highest ** (1 / RHO)
    return [(high + t * (low - high)) ** RHO for t in even(0.0, 1.0, count)]


def to_float32(values: Sequence[float]) -> list[float]:
    """The values rounded to float32, as the reference keeps them."""
    return torch.tensor(values, dtype=torch.float32).tolist()
