"""Keeping what a mask does not repaint.

Legend: B rows, C latent channels, F frames, H W pixels, h w latent cells.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ..schedulers.base import Point, Slope


def keep_outside(slope: Slope, x0: Tensor, repaint: Tensor) -> Slope:
    """`slope` where `repaint` [B, 1, 1, h, w] is true; elsewhere the slope of the known latents `x0` [B, C, F, h, w].

    (x - x0) / sigma is the exact slope of latents whose data is x0, so outside the mask every sampler stays at
    alpha x0 + sigma noise with the run's own noise, at each step's level, and ends at x0.
    """

    def masked(x: Tensor, point: Point) -> Tensor:
        return torch.where(repaint, slope(x, point), (x - x0) / point.sigma)

    return masked


def latent_mask(mask: Tensor, downsampling: int) -> Tensor:
    """The cells [B, 1, 1, h, w] of which the pixel mask [B, 1, 1, H, W] (true: repaint) touches any pixel."""
    touched = functional.max_pool2d(mask[:, 0].float(), downsampling)
    return touched[:, None] > 0
