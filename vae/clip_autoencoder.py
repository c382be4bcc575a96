"""What the autoencoders of clips have in common whose weights a module of diffusers holds.

Legend: B rows, C latent channels, F pixel frames, f latent frames, H W pixels, h w latent cells.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core.saving import Component
from .checks import check_pixels, check_values
from .groups import put_together
from .latent_space import LatentSpace, drawn_latents, mean_and_std
from .loading import autoencoder_component
from .tiling import InParts, Tiling


@dataclass(frozen=True, kw_only=True, eq=False)
class ClipAutoencoder(ABC):
    """Maps clips in -1..1 to normalised latents and back. Nothing changes in a call, so threads may share it: what is
    kept of earlier frames belongs to the call.

    `module` holds the weights, by diffusers' names, and computes in their dtype. Whatever comes in is cast to that;
    results are float32.

    `slicing`: row by row. `tiling`: also tile by tile. Attention then sees a tile only, and convolutions nothing beyond
    it, which changes the result: see `KLAutoencoder`.
    """

    module: nn.Module
    tiling: Tiling | None = None
    slicing: bool = False

    @property
    @abstractmethod
    def latent_channels(self) -> int:
        """C."""

    @property
    @abstractmethod
    def downsampling(self) -> int:
        """Pixels a side per latent cell."""

    @property
    @abstractmethod
    def temporal_downsampling(self) -> int:
        """Frames per latent frame after the first, which is one frame."""

    @abstractmethod
    def _space(self, device: torch.device) -> LatentSpace:
        """Where the latents lie, for tensors on the device."""

    @abstractmethod
    def _moments(self, pixels: Tensor) -> Tensor:
        """What the encoder gives of pixels [B, 3, F, H, W]: mean and log variance [B, 2 C, f, h, w], float32."""

    @abstractmethod
    def _stream(self, latents: Tensor) -> Iterator[Tensor]:
        """As `stream_decode`, of latents that it has checked."""

    def component(self) -> Component:
        """See `Saveable`. Raises ValueError as that of `KLAutoencoder` does."""
        return autoencoder_component(self.module, self.tiling)

    def encode(self, pixels: Tensor, noise: Tensor | None = None) -> Tensor:
        """Latents [B, C, f, h, w] of pixels [B, 3, F, H, W]: the posterior's mean, or mean + std * `noise`.

        Raises ValueError for pixels or noise of another shape, frames that are no whole number of groups after the
        first, sides that are no multiple of the downsampling, or numbers that are not floating-point.
        """
        return drawn_latents(*self.posterior(pixels), noise)

    def posterior(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation [B, C, f, h, w], normalised, of the latents of pixels. Raises as `encode`."""
        check_pixels(pixels, self.downsampling, self.temporal_downsampling)
        mean, std = mean_and_std(self._moments(pixels))
        space = self._space(mean.device)
        return space.normalised(mean), space.deviation(std)

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, F, H, W], about -1..1, of latents [B, C, f, h, w]. Raises ValueError for another shape, or
        numbers that are not floating-point."""
        return put_together(self.stream_decode(latents), latents, self.downsampling, self.temporal_downsampling)

    def stream_decode(self, latents: Tensor) -> Iterator[Tensor]:
        """What `decode` gives, some frames at a time as they are ready. Raises at once what `decode` raises."""
        check_values("latents", latents, self.latent_channels)
        return self._stream(latents)

    def _parts(self, unit_in: int, unit_out: int) -> InParts:
        """The options, for a network that makes cells of `unit_out` of those of `unit_in`."""
        return InParts(tiling=self.tiling, slicing=self.slicing, unit_in=unit_in, unit_out=unit_out)

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.module.parameters()).dtype
