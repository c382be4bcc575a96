"""The autoencoder of `plate`: 8x in space. `PlateVAE` works frame by frame, so that a picture is a clip of one frame;
`PlateClipVAE` keeps one frame in a few, and draws the others from two that it keeps.

Legend: B batch, C channels, F frames, f latent frames, G frames in a group, H W pixels, h w = H/8 W/8 latent cells,
D channels at 1/8.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .between import Between
from .frames import check_frames
from .plate_blocks import ChannelNorm, ResidualBlock, conv

DOWNSAMPLING = 8


@dataclass(frozen=True, kw_only=True)
class PlateVAEConfig:
    """Sizes of the autoencoder. Widths are channels at 1/4 and 1/8 of the resolution (encoder) and at 1/8, 1/4, 1/2
    (decoder)."""

    latent_channels: int = 8
    encoder_widths: tuple[int, int] = (64, 128)
    encoder_blocks: tuple[int, int] = (1, 2)
    decoder_widths: tuple[int, int, int] = (128, 64, 32)
    decoder_blocks: tuple[int, int, int] = (6, 3, 2)
    norm_eps: float = 1e-6


class PlateVAE(nn.Module):
    """Maps pictures in -1..1 to latents of zero mean and unit variance, and back."""

    latent_mean: Tensor  # [C]
    latent_std: Tensor  # [C]

    def __init__(self, config: PlateVAEConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.register_buffer("latent_mean", torch.zeros(config.latent_channels))
        self.register_buffer("latent_std", torch.ones(config.latent_channels))

    @property
    def latent_channels(self) -> int:
        """C."""
        return self.config.latent_channels

    @property
    def downsampling(self) -> int:
        """Pixels a side per latent cell."""
        return DOWNSAMPLING

    def posterior(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance, before normalisation, [B*F, C, h, w], of frames [B*F, 3, H, W]."""
        mean, log_variance = self.encoder(pixels).chunk(2, dim=1)
        return mean, log_variance.clamp(-12.0, 4.0)

    def encode(self, pixels: Tensor, noise: Tensor | None = None) -> Tensor:
        """Normalised latents (the posterior's mean) [B, C, F, h, w] of pixels [B, 3, F, H, W] in -1..1."""
        mean, _ = self.posterior(_frames_into_batch(pixels.to(self.latent_mean.dtype)))
        return self.normalise(_frames_out_of_batch(mean, pixels.shape[0]))

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, F, H, W], about -1..1, of normalised latents [B, C, F, h, w]."""
        frames = self.decoder(_frames_into_batch(self.denormalise(latents.to(self.latent_mean.dtype))))
        return _frames_out_of_batch(frames, latents.shape[0])

    def normalise(self, raw: Tensor) -> Tensor:
        """Raw latents [B, C, F, h, w] to zero mean and unit variance per channel."""
        return (raw - self.latent_mean.view(1, -1, 1, 1, 1)) / self.latent_std.view(1, -1, 1, 1, 1)

    def denormalise(self, latents: Tensor) -> Tensor:
        """The inverse of `normalise`."""
        return latents * self.latent_std.view(1, -1, 1, 1, 1) + self.latent_mean.view(1, -1, 1, 1, 1)


@dataclass(frozen=True, kw_only=True)
class PlateClipVAEConfig(PlateVAEConfig):
    """Sizes: `group` is G; blocks at 1/8 of the resolution that look at two latent frames, and the width of what mends
    the frames between."""

    group: int = 4
    between_blocks: int = 4
    between_width: int = 32

    def __post_init__(self) -> None:
        if self.group < 2:
            raise ValueError(f"group is {self.group}; it must be at least 2, else there is nothing between frames")


class PlateClipVAE(PlateVAE):
    """The first frame, and the last one of each group after it, are latent frames, and drawn as pictures are.
    The others of a group are made of that frame and the one before it, so decoding is causal."""

    def __init__(self, config: PlateClipVAEConfig) -> None:
        super().__init__(config)
        self.group = config.group
        self.between = Between(
            features=config.decoder_widths[0],
            count=config.group - 1,
            blocks=config.between_blocks,
            width=config.between_width,
            eps=config.norm_eps,
        )

    @property
    def temporal_downsampling(self) -> int:
        """G."""
        return self.group

    def encode(self, pixels: Tensor, noise: Tensor | None = None) -> Tensor:
        """Normalised latents [B, C, f, h, w] of pixels [B, 3, F, H, W] in -1..1, of which one frame in G is read.

        Raises ValueError for frames that are no whole number of groups after the first."""
        check_frames(pixels.shape[2], self.group)
        return super().encode(pixels[:, :, :: self.group])

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, 1 + (f - 1) G, H, W], about -1..1, of normalised latents [B, C, f, h, w]."""
        return torch.cat([*self.stream_decode(latents)], dim=2)

    def stream_decode(self, latents: Tensor) -> Iterator[Tensor]:
        """What `decode` gives: the first frame, then group by group."""
        raw = self.denormalise(latents.to(self.latent_mean.dtype))
        return self._groups(raw)

    def _groups(self, raw: Tensor) -> Iterator[Tensor]:
        first, *rest = raw.unbind(2)
        before = self.features_and_pixels(first)
        yield before[1][:, :, None]
        for frame in rest:
            after = self.features_and_pixels(frame)
            between = self.between((before[0], after[0]), (before[1], after[1]))
            yield torch.cat((between, after[1][:, :, None]), dim=2)
            before = after

    def features_and_pixels(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        """The decoder's state at 1/8 of the resolution, [B, D, h, w], and its frame [B, 3, H, W], of raw latents."""
        features = self.decoder.features(raw)
        return features, self.decoder.pixels(features)


class Encoder(nn.Sequential):
    """Frames [N, 3, H, W] to moments [N, 2C, h, w]."""

    def __init__(self, config: PlateVAEConfig) -> None:
        wide, deep = config.encoder_widths
        super().__init__(
            nn.PixelUnshuffle(4),
            conv(48, wide),
            *(ResidualBlock(wide, config.norm_eps) for _ in range(config.encoder_blocks[0])),
            nn.Conv2d(wide, deep, 2, stride=2),
            *(ResidualBlock(deep, config.norm_eps) for _ in range(config.encoder_blocks[1])),
            ChannelNorm(deep, config.norm_eps),
            nn.SiLU(),
            nn.Conv2d(deep, 2 * config.latent_channels, 1),
        )


class Decoder(nn.Sequential):
    """Raw latents [N, C, h, w] to frames [N, 3, H, W]."""

    def __init__(self, config: PlateVAEConfig) -> None:
        eighth, blocks = config.decoder_widths[0], config.decoder_blocks[0]
        super().__init__(
            conv(config.latent_channels, eighth),
            *(ResidualBlock(eighth, config.norm_eps) for _ in range(blocks)),
            *_tail(config),
        )
        self.depth = 1 + blocks

    def features(self, raw: Tensor) -> Tensor:
        """The state at 1/8 of the resolution, [N, D, h, w]."""
        return _through([*self][: self.depth], raw)

    def pixels(self, features: Tensor) -> Tensor:
        """The frames of that state."""
        return _through([*self][self.depth :], features)


def _through(layers: Sequence[nn.Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def _tail(config: PlateVAEConfig) -> list[nn.Module]:
    """From features at 1/8 of the resolution to pixels."""
    eighth, quarter, half = config.decoder_widths
    _, blocks_quarter, blocks_half = config.decoder_blocks
    return [
        *_upsample(eighth, quarter),
        *(ResidualBlock(quarter, config.norm_eps) for _ in range(blocks_quarter)),
        *_upsample(quarter, half),
        *(ResidualBlock(half, config.norm_eps) for _ in range(blocks_half)),
        ChannelNorm(half, config.norm_eps),
        nn.SiLU(),
        conv(half, 12),
        nn.PixelShuffle(2),
    ]


def _upsample(width_in: int, width_out: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(width_in, 4 * width_out, 1), nn.PixelShuffle(2)


def _frames_into_batch(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1)


def _frames_out_of_batch(x: Tensor, batch: int) -> Tensor:
    return x.unflatten(0, (batch, -1)).transpose(1, 2)
