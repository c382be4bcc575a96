"""Embeddings of times and other numbers, as the families that began with diffusers' layers make them.

Legend: E values, D width.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..schedulers.base import Point

SINUSOID_WIDTH = 256
TIME_SCALE = 1000.0


def sinusoid(values: Tensor, width: int = SINUSOID_WIDTH, period: float = 10000.0, *, scale: float = 1.0) -> Tensor:
    """Cosines, then sines, of values [E] at falling frequencies, float32 [E, width] (Ho et al. 2020).

    `scale` multiplies the angles: not the same as values times `scale` in the last bits, which a sine of 1000 shows.
    """
    angles = values.float()[:, None] * frequencies(width // 2, values.device, period) * scale
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def thousandfold(evaluations: Sequence[Point], device: torch.device) -> Tensor:
    """1000 times each point's time, float32 [E], rounded as pipelines do that divide by 1000 before the model: an angle
    of 1000 shows the last bit."""
    times = torch.tensor([point.time for point in evaluations], dtype=torch.float32, device=device)
    return times * TIME_SCALE / TIME_SCALE * TIME_SCALE


def frequencies(count: int, device: torch.device, period: float = 10000.0) -> Tensor:
    """From 1 down to almost 1 / period in equal ratios, float32 [count]."""
    return torch.exp(-math.log(period) * torch.arange(count, dtype=torch.float32, device=device) / count)


class Embedder(nn.Module):
    """outer(silu(inner(x))), `hidden` wide in between (None: as wide as the result)."""

    def __init__(self, width_in: int, width: int, *, bias: bool = True, hidden: int | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(width_in, width if hidden is None else hidden, bias=bias)
        self.outer = nn.Linear(self.inner.out_features, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[E, width_in], any float, to [E, D] in the weights' dtype."""
        return self.outer(functional.silu(self.inner(x.to(self.inner.weight.dtype))))
