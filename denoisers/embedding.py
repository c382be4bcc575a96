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
    half = width // 2
    exponents = -math.log(period) * torch.arange(half, dtype=torch.float32, device=values.device) / half
    angles = values.float()[:, None] * exponents.exp()
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class Embedder(nn.Module):
    """outer(silu(inner(x)))."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width_in, width)
        self.outer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[E, width_in], any float, to [E, D] in the weights' dtype."""
        return self.outer(functional.silu(self.inner(x.to(self.inner.weight.dtype))))
