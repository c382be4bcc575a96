"""The noise levels that a DDPM-type model was trained at. In float32 and in diffusers' order, to have its numbers."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

BetaSchedule = Literal["linear", "scaled_linear", "squaredcos_cap_v2"]


def make_betas(schedule: BetaSchedule, start: float, end: float, count: int) -> Tensor:
    """`count` betas [T]: equal steps in beta, equal steps in its root, or a cosine alpha-bar (which has no ends)."""
    if schedule == "linear":
        return torch.linspace(start, end, count, dtype=torch.float32)
    if schedule == "scaled_linear":
        return torch.linspace(start**0.5, end**0.5, count, dtype=torch.float32) ** 2
    alpha_bars = [_cosine_alpha_bar(i / count) for i in range(count + 1)]
    pairs = zip(alpha_bars[1:], alpha_bars, strict=False)
    return torch.tensor([min(1 - after / before, 0.999) for after, before in pairs], dtype=torch.float32)


def train_sigmas(betas: Tensor, *, zero_snr: bool) -> list[float]:
    """sqrt((1 - a) / a) for every training timestep, rising; a is the product of 1 - beta up to it.

    With `zero_snr`, betas are rescaled first (Lin et al. 2023, https://arxiv.org/abs/2305.08891, algorithm 1) and the
    last a, which would be 0, is 2^-24: a last sigma of 4096.
    """
    alpha_bars = torch.cumprod(1.0 - (_rescaled(betas) if zero_snr else betas), dim=0)
    if zero_snr:
        alpha_bars[-1] = 2.0**-24
    return (((1 - alpha_bars) / alpha_bars) ** 0.5).tolist()


def check_betas(betas: Sequence[float]) -> None:
    """Refuse betas that are not between 0 and 1.

    Raises:
        ValueError: naming the first one.
    """
    if len(betas) < 2:
        raise ValueError(f"a model has at least two training timesteps, got {len(betas)}")
    for i, beta in enumerate(betas):
        if not 0.0 < beta < 1.0:
            raise ValueError(f"betas lie between 0 and 1, got {beta:g} at timestep {i}")


def _rescaled(betas: Tensor) -> Tensor:
    roots = torch.cumprod(1.0 - betas, dim=0).sqrt()
    first, last = roots[0].clone(), roots[-1].clone()
    alpha_bars = ((roots - last) * (first / (first - last))) ** 2
    return 1 - torch.cat([alpha_bars[:1], alpha_bars[1:] / alpha_bars[:-1]])


def _cosine_alpha_bar(t: float) -> float:
    return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2
