"""Keeping what a mask does not repaint, and telling a model that was made for inpainting what it is.

Legend: B rows, C latent channels, F frames, H W pixels, h w latent cells.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..schedulers.base import Point, Slope, Step
from .plan import Inputs, Plan
from .request import Request


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


@dataclass(frozen=True)
class MaskReader:
    """What a model that was made for inpainting reads beside its latents: the mask (1: repaint), and the latents of the
    picture with grey where it is repainted. Nothing else keeps its latents at the picture's."""

    def check(self, request: Request) -> None:
        """Raises ValueError for a request without a picture or a mask."""
        for name, picture in (("image", request.image), ("mask_image", request.mask_image)):
            if picture is None:
                both = "this model was made for inpainting, and takes image and mask_image"
                raise ValueError(f"{name} is not given; {both}")

    def begins_with_noise(self, plan: Plan) -> bool:
        """Whether a run begins with noise alone, as the reference does at strength 1, where the picture is not read."""
        return plan.strength == 1

    def covered(self, inputs: Inputs) -> Inputs:
        """The pictures with grey where they are repainted, one for each that is made."""
        mask = inputs.each_mask
        assert mask is not None
        pixels = inputs.each_pixels * ~mask
        return Inputs(pixels=pixels, rows=tuple(range(len(pixels))), mask=None, mask_rows=())

    def beside(self, mask: Tensor, covered: Tensor) -> Tensor:
        """What is read, [B, 1 + C, 1, h, w], of a mask [B, 1, 1, H, W] and the latents [B, C, 1, h, w] of what is
        covered: each cell of the mask is its first pixel's, as the reference has it."""
        cells = functional.interpolate(mask[:, 0].to(covered), size=tuple(covered.shape[3:]))
        return torch.cat((cells[:, None], covered), dim=1)


def latent_mask(mask: Tensor, downsampling: int) -> Tensor:
    """The cells [B, 1, 1, h, w] of which the pixel mask [B, 1, 1, H, W] (true: repaint) touches any pixel."""
    touched = functional.max_pool2d(mask[:, 0].float(), downsampling)
    return touched[:, None] > 0
