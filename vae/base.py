"""What every autoencoder gives.

Legend: B rows, C latent channels, F frames, H W pixels, h w latent cells.
"""

from typing import Protocol

from torch import Tensor


class Autoencoder(Protocol):
    """From pixels to latents of about zero mean and unit variance, and back."""

    @property
    def latent_channels(self) -> int:
        """C."""
        ...

    @property
    def downsampling(self) -> int:
        """Pixels a side per latent cell: H / h."""
        ...

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents [B, C, F, h, w] of pixels [B, 3, F, H, W] in -1..1."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, F, H, W], about -1..1, of latents [B, C, F, h, w]."""
        ...
