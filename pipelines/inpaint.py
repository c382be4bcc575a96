"""Keeping what a mask does not repaint.

Legend: B rows, C latent channels, F frames, H W pixels, h w latent cells.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..schedulers.base import Point, Slope, Step


@dataclass(frozen=True, kw_only=True, eq=False)
class Kept:
    """Latents outside `repaint` [B, 1, 1, h, w]: alpha `x0` + sigma `noise` at every step, both [B, C, F, h, w], with
    the run's own noise; `clean` at the point `last` of the whole schedule, where a run ends."""

    x0: Tensor
    noise: Tensor
    repaint: Tensor
    last: int
    clean: Tensor

    def slope(self, slope: Slope) -> Slope:
        """`slope` where it repaints, of latents that are as above elsewhere; there (x - x0) / sigma, the exact slope of
        latents whose data is x0, so that every sampler goes to x0."""

        def kept(x: Tensor, point: Point) -> Tensor:
            shown = torch.where(self.repaint, x, point.noised(self.x0, self.noise))
            return torch.where(self.repaint, slope(shown, point), (x - self.x0) / point.sigma)

        return kept

    def step(self, step: Step, point: Point) -> Step:
        """A step that ends at `point`, with what is kept as it is at that level, also where the sampler has added noise
        of its own."""
        outside = self.clean if point.index == self.last else point.noised(self.x0, self.noise)
        latents = torch.where(self.repaint, step.latents, outside)
        return dataclasses.replace(step, latents=latents, state=dataclasses.replace(step.state, latents=latents))


def latent_mask(mask: Tensor, downsampling: int) -> Tensor:
    """The cells [B, 1, 1, h, w] of which the pixel mask [B, 1, 1, H, W] (true: repaint) touches any pixel."""
    touched = functional.max_pool2d(mask[:, 0].float(), downsampling)
    return touched[:, None] > 0
