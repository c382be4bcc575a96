"""Normalisation layers. Statistics are always taken in float32."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from .ops import kernels

_ZERO = torch.zeros(())


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (weight + offset) over the last axis (Zhang & Sennrich 2019).

    `affine=False` leaves the weight out. `offset` is 1 where a checkpoint keeps weights around 0 (Gemma).
    """

    def __init__(self, width: int, *, eps: float = 1e-6, affine: bool = True, offset: float = 0.0) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.shape = (width,)
        self.weight = nn.Parameter(torch.full((width,), 1.0 - offset)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to the same shape and dtype."""
        weight = self.weight_for(x)
        if weight is not None and self.offset:
            return functional.rms_norm(x.float(), self.shape, weight.float() + self.offset, self.eps).to(x.dtype)
        if weight is None or weight.dtype == x.dtype:
            if x.shape[-1:] == self.shape and kernels.runs(x, *_given(weight)):
                return kernels.rms_norm(x, weight, self.eps)
            if _is_plain(x):
                return _rms_norm(x, weight, self.eps)
            return functional.rms_norm(x, self.shape, weight, self.eps)
        return functional.rms_norm(x, self.shape, None, self.eps) * weight

    def weight_for(self, x: Tensor) -> Tensor | None:
        """The weight, in float32 where x is."""
        weight = self.weight
        return weight.float() if weight is not None and x.dtype is torch.float32 else weight


def _is_plain(x: Tensor) -> bool:
    """Whether our own operations are faster, and allowed."""
    return x.dtype is torch.float32 and x.is_cpu and kernels.alone()


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`functional.rms_norm`, which is seven operations on a CPU, in fewer, with no temporary of the input's size."""
    width = x.shape[-1]
    if x.numel() == width:  # one row, as in decoding: its scale is a number
        scale = 1 / math.sqrt(float(torch.linalg.vector_norm(x)) ** 2 / width + eps)
        return x * scale if weight is None else torch.addcmul(_ZERO, x, weight, value=scale)
    return _rms_norm_rows(x, weight, eps, torch.empty_like(x))


def _rms_norm_rows(x: Tensor, weight: Tensor | None, eps: float, out: Tensor) -> Tensor:
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    torch.mul(x, norms.square_().div_(x.shape[-1]).add_(eps).rsqrt_(), out=out)
    return out if weight is None else out.mul_(weight)


def norm_halves(x: Tensor, first: nn.Module, second: nn.Module, out: Tensor) -> None:
    """Axis 1 in halves, each through a norm of its own, into `out`; both [B, 2 H, L, Dh]. No gradient follows."""
    for norm, half, place in zip((first, second), x.chunk(2, dim=1), out.chunk(2, dim=1), strict=True):
        if not isinstance(norm, RMSNorm) or norm.offset or not _is_plain(x):
            place.copy_(norm(half))
            continue
        weight = norm.weight_for(x)
        if kernels.runs(x, place, *_given(weight)) and x.stride(-1) == 1:
            kernels.rms_norm_into(half, weight, norm.eps, place)
        else:
            _rms_norm_rows(half, weight, norm.eps, place)


def _given(weight: Tensor | None) -> tuple[Tensor, ...]:
    return () if weight is None else (weight,)


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
