"""Embeddings of times and other numbers, as the families that began with diffusers' layers make them.

Legend: E values, D width.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

SINUSOID_WIDTH = 256


def sinusoid(values: Tensor, width: int = SINUSOID_WIDTH, period: float = 10000.0) -> Tensor:
    """Cosines, then sines, of values [E] at falling frequencies, float32 [E, width] (Ho et al. 2020)."""
    angles = values.float()[:, None] * frequencies(width // 2, values.device, period)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def frequencies(count: int, device: torch.device, period: float = 10000.0) -> Tensor:
    """From 1 down to almost 1 / period in equal ratios, float32 [count]."""
    return torch.exp(-math.log(period) * torch.arange(count, dtype=torch.float32, device=device) / count)


class Embedder(nn.Module):
    """outer(silu(inner(x)))."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width_in, width)
        self.outer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[E, width_in], any float, to [E, D] in the weights' dtype."""
        return self.outer(functional.silu(self.inner(x.to(self.inner.weight.dtype))))
