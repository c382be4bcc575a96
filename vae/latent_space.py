"""Where latents lie: what an encoder gives, a posterior, and its values made of about zero mean and unit variance.

Legend: B rows, C latent channels, F frames, h w latent cells; numbers by channel are [1, C, 1, 1, 1], float32.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class LatentSpace(Protocol):
    """One kind of normalisation; immutable."""

    def normalised(self, z: Tensor) -> Tensor:
        """Latents [B, C, F, h, w] of the encoder's."""
        ...

    def deviation(self, std: Tensor) -> Tensor:
        """The latents' standard deviation, of that of the encoder's."""
        ...

    def raw(self, latents: Tensor) -> Tensor:
        """The inverse of `normalised`, float32."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Standardised:
    """(z - mean) / std, by channel."""

    mean: Tensor
    std: Tensor

    def normalised(self, z: Tensor) -> Tensor:
        """See `LatentSpace`."""
        return (z - self.mean) / self.std

    def deviation(self, std: Tensor) -> Tensor:
        """See `LatentSpace`."""
        return std / self.std

    def raw(self, latents: Tensor) -> Tensor:
        """See `LatentSpace`."""
        return latents.float() * self.std + self.mean


@dataclass(frozen=True, kw_only=True, eq=False)
class Scaled:
    """(z - shift) * scale, by channel or for all."""

    shift: Tensor | float = 0.0
    scale: Tensor | float

    def normalised(self, z: Tensor) -> Tensor:
        """See `LatentSpace`."""
        return (z - self.shift) * self.scale

    def deviation(self, std: Tensor) -> Tensor:
        """See `LatentSpace`."""
        return std * self.scale

    def raw(self, latents: Tensor) -> Tensor:
        """See `LatentSpace`."""
        return latents.float() / self.scale + self.shift


def mean_and_std(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Those of a posterior, [B, C, ...] each, of what an encoder gives: [B, 2 C, ...], mean and log variance."""
    mean, log_variance = moments.chunk(2, dim=1)
    return mean, torch.exp(0.5 * log_variance.clamp(-30.0, 20.0))


def drawn_latents(mean: Tensor, std: Tensor, noise: Tensor | None) -> Tensor:
    """A posterior's mean, or mean + std * `noise`. Raises ValueError for noise of another shape."""
    if noise is None:
        return mean
    if noise.shape != mean.shape:
        raise ValueError(f"noise has shape {list(noise.shape)}; the latents have {list(mean.shape)}")
    return mean + std * noise.to(mean)
