"""A look at latents without decoding them.

Legend: B rows, C latent channels, F frames, h w latent cells.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class LatentPreview:
    """A linear projection of each latent cell to one colour: `weight` [3, C] and `bias` [3], fitted to the
    autoencoder."""

    weight: Tensor
    bias: Tensor

    def __post_init__(self) -> None:
        if self.weight.ndim != 2 or self.weight.shape[0] != 3 or tuple(self.bias.shape) != (3,):
            shapes = f"{tuple(self.weight.shape)} and {tuple(self.bias.shape)}"
            raise ValueError(f"a preview takes weight [3, C] and bias [3], got {shapes}")

    def __call__(self, latents: Tensor) -> Tensor:
        """Float32 pixels [B, 3, F, h, w] in -1..1 of latents [B, C, F, h, w]."""
        weight, bias = (tensor.to(latents.device, torch.float32) for tensor in (self.weight, self.bias))
        colours = torch.einsum("rc,bcfhw->brfhw", weight, latents.float()) + bias.view(1, 3, 1, 1, 1)
        return colours.clamp(-1.0, 1.0)
