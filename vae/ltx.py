"""The video autoencoders of LTX-Video: diffusers' `AutoencoderKLLTXVideo` behind our interface.

The first frame is a latent frame of its own, each group of frames after it another. From 0.9.1 on, the decoder takes
the last noise away as well: it is told a time, and latents are mixed with noise before.

Legend: B rows, C latent channels, F pixel frames, f latent frames, H W pixels, h w latent cells.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from .clip_autoencoder import ClipAutoencoder
from .latent_space import Standardised
from .loading import Checkpoints, module_on_meta
from .ltx_config import CLASS_NAME, LTXVAEConfig, read_ltx_vae_config
from .ltx_decoder import LTXDecoding
from .ltx_keys import PREFIXES, ltx_key_map
from .ltx_shapes import sized_ltx_vae_config

NOISE_SEED = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class LTXAutoencoder(ClipAutoencoder):
    """See `ClipAutoencoder`. A clip is decoded frame by frame, so that the memory that it takes, beside what goes in
    and comes out, does not grow with its length; it is encoded as a whole.

    `time`: what a decoder is told that is told one. Some (0.9.1) add noise of their own in their layers, which is the
    same in every call.
    """

    config: LTXVAEConfig
    time: float = 0.0

    @property
    def latent_channels(self) -> int:
        """C."""
        return self.config.latent_channels

    @property
    def downsampling(self) -> int:
        """Pixels a side per latent cell."""
        return self.config.pixels_per_cell

    @property
    def temporal_downsampling(self) -> int:
        """Frames per latent frame after the first, which is one frame."""
        return self.config.frames_per_cell

    @property
    def is_told_time(self) -> bool:
        """Whether the decoder is."""
        return self.config.timestep_conditioning

    def at(self, time: float) -> Self:
        """The same, whose decoder is told another time, in 0..1."""
        return dataclasses.replace(self, time=time)

    def noised(self, latents: Tensor, noise: Tensor, share: float) -> Tensor:
        """Latents [B, C, f, h, w] whose values, as the decoder has them, are mixed with standard normal ones; where no
        share is noise, as they are."""
        if share == 0:
            return latents
        space = self._space(latents.device)
        return space.normalised((1 - share) * space.raw(latents) + share * noise)

    def _moments(self, pixels: Tensor) -> Tensor:
        encoder = self.module.get_submodule("encoder")
        return self._parts(self.downsampling, 1)(lambda part: encoder(part.to(self._dtype)).float(), pixels)

    def _stream(self, latents: Tensor) -> Iterator[Tensor]:
        return self._decoded(self._space(latents.device).raw(latents).to(self._dtype))

    def _decoded(self, latents: Tensor) -> Iterator[Tensor]:
        """Frames [B, 3, 1, H, W], float32, of raw latents, part by part as the options say; each part is a stream."""
        parts, decoder = self._parts(1, self.downsampling), self.module.get_submodule("decoder")
        streams = cycle([self._decoding(decoder)(part) for part in parts.cut(latents)])
        for _ in range(1 + (latents.shape[2] - 1) * self.temporal_downsampling):
            yield parts(lambda _: next(next(streams)).float(), latents[:, :, :1])

    def _decoding(self, decoder: nn.Module) -> LTXDecoding:
        return LTXDecoding(decoder=decoder, time=self.time, noise=torch.Generator().manual_seed(NOISE_SEED))

    def _space(self, device: torch.device) -> Standardised:
        both = (self.module.get_buffer(name) for name in ("latents_mean", "latents_std"))
        mean, std = (each.to(device, torch.float32).view(1, -1, 1, 1, 1) for each in both)
        return Standardised(mean=mean, std=std)


def _build(config: LTXVAEConfig) -> nn.Module:
    """diffusers' module on the meta device. Raises ValueError for sizes that make none."""
    from diffusers.models.autoencoders import autoencoder_kl_ltx as theirs

    return module_on_meta(CLASS_NAME, cast(Any, theirs).AutoencoderKLLTXVideo, config.entries())


_CHECKPOINTS = Checkpoints(
    config_of_folder=read_ltx_vae_config,
    config_of_shapes=sized_ltx_vae_config,
    prefixes=PREFIXES,
    build=_build,
    key_map=ltx_key_map,
    wrap=LTXAutoencoder,
)
load_ltx_vae = _CHECKPOINTS.load_folder
load_ltx_vae_file = _CHECKPOINTS.load_file
"""Of a file in Lightricks' layout, alone or beside a denoiser, or, where its config is given, diffusers'."""
