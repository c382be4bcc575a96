"""Normalisation layers. Statistics are always taken in float32."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang & Sennrich 2019).

    `affine=False` leaves the weight out.
    """

    def __init__(self, width: int, *, eps: float = 1e-6, affine: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to the same shape and dtype."""
        h = x.float()
        h = (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return h if self.weight is None else h * self.weight


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps), then weight and bias where `affine` (Ba et al. 2016)."""

    def __init__(self, width: int, *, eps: float = 1e-6, affine: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.width = width
        self.weight = nn.Parameter(torch.ones(width)) if affine else None
        self.bias = nn.Parameter(torch.zeros(width)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to the same shape and dtype."""
        weight = None if self.weight is None else self.weight.float()
        bias = None if self.bias is None else self.bias.float()
        return functional.layer_norm(x.float(), (self.width,), weight, bias, self.eps).to(x.dtype)
