"""What every autoencoder gives.

Legend: B rows, C latent channels, F frames, H W pixels, h w latent cells.
"""

from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
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

    def encode(self, pixels: Tensor, noise: Tensor | None = None) -> Tensor:
        """Latents [B, C, F, h, w] of pixels [B, 3, F, H, W] in -1..1; with `noise`, standard normal and of the latents'
        shape, a sample of their distribution where the autoencoder has one."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, F, H, W], about -1..1, of latents [B, C, F, h, w]."""
        ...


@runtime_checkable
class VideoAutoencoder(Autoencoder, Protocol):
    """One whose latents have fewer frames than its clips: the first frame is a latent frame of its own, each group of
    frames after it another. A clip of n latent frames has 1 + (n - 1) * `temporal_downsampling` frames."""

    @property
    def temporal_downsampling(self) -> int:
        """Frames in a group."""
        ...

    def stream_decode(self, latents: Tensor) -> Iterator[Tensor]:
        """What `decode` gives, group by group of frames as they are ready, in memory that does not grow with the clip.

        Raises at once what `decode` raises."""
        ...


@runtime_checkable
class ContinuingAutoencoder(VideoAutoencoder, Protocol):
    """One whose decoder goes on from stretch to stretch of a clip's latents."""

    def stream_stretches(self, stretches: Iterable[Tensor]) -> Iterator[Tensor]:
        """What `stream_decode` gives of the latents [B, C, F, h, w] that `stretches` make up, one after the other: each
        is taken when its turn comes, and its frames come before the next one is asked for."""
        ...
