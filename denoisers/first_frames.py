"""Clips that begin with frames which are known, for denoisers whose slope says nothing of these (LTX-Video).

Legend: B rows, C latent channels, F frames, h w latent cells.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..schedulers.base import Point, Slope
from .base import Denoiser, P, Prompt
from .guidance import Guidance, Run


@dataclass(frozen=True)
class FirstFramesKept:
    """The slope of `then`, but in the frames that the conditioning's first reference holds: there (x - x0) / sigma, the
    exact slope of latents whose data is known, so that every sampler goes to x0. What `then` makes of whole rows (a
    rescale) sees what the network gave there."""

    then: Guidance

    @property
    def needs_negative(self) -> bool:
        """As `then` does."""
        return self.then.needs_negative

    def bind(self, denoiser: Denoiser[P], prompt: Prompt, run: Run) -> Slope:
        """The slope; that of `then` itself where there is no reference."""
        slope = self.then.bind(denoiser, prompt, run)
        known = next(iter(prompt.positive.references), None)  # [B, C, known frames, h, w]
        if known is None:
            return slope
        count = known.shape[2]

        def kept(x: Tensor, point: Point) -> Tensor:
            led = (x[:, :, :count] - known) / point.sigma
            return torch.cat((led, slope(x, point)[:, :, count:]), dim=2)

        return kept
