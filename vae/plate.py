"""The picture autoencoder of `plate`: 8x in space, frame by frame, so that a picture is a clip of one frame.

Legend: B batch, C channels, F frames, H W pixels, h w = H/8 W/8 latent cells.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

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


class Encoder(nn.Sequential):
    """Frames [N, 3, H, W] to moments [N, 2C, h, w]."""

    def __init__(self, config: PlateVAEConfig) -> None:
        wide, deep = config.encoder_widths
        super().__init__(
            nn.PixelUnshuffle(4),
            _conv(48, wide),
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
        eighth, quarter, half = config.decoder_widths
        blocks = config.decoder_blocks
        super().__init__(
            _conv(config.latent_channels, eighth),
            *(ResidualBlock(eighth, config.norm_eps) for _ in range(blocks[0])),
            *_upsample(eighth, quarter),
            *(ResidualBlock(quarter, config.norm_eps) for _ in range(blocks[1])),
            *_upsample(quarter, half),
            *(ResidualBlock(half, config.norm_eps) for _ in range(blocks[2])),
            ChannelNorm(half, config.norm_eps),
            nn.SiLU(),
            _conv(half, 12),
            nn.PixelShuffle(2),
        )


class ResidualBlock(nn.Module):
    """x + conv(SiLU(conv(SiLU(norm(x)))))."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.norm = ChannelNorm(width, eps)
        self.conv_1 = _conv(width, width)
        self.conv_2 = _conv(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] to the same."""
        h = self.conv_1(functional.silu(self.norm(x)))
        return x + self.conv_2(functional.silu(h))


class ChannelNorm(nn.Module):
    """Root-mean-square norm over the channels of each pixel."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] to the same."""
        scale = torch.rsqrt(x.float().square().mean(1, keepdim=True) + self.eps)
        return x * (scale.to(x.dtype) * self.weight.to(x.dtype).view(1, -1, 1, 1))


def _conv(width_in: int, width_out: int) -> nn.Conv2d:
    return nn.Conv2d(width_in, width_out, 3, padding=1)


def _upsample(width_in: int, width_out: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(width_in, 4 * width_out, 1), nn.PixelShuffle(2)


def _frames_into_batch(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1)


def _frames_out_of_batch(x: Tensor, batch: int) -> Tensor:
    return x.unflatten(0, (batch, -1)).transpose(1, 2)
