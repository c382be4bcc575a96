"""The video autoencoder of HunyuanVideo 1.5: diffusers' `AutoencoderKLHunyuanVideo15` behind our interface.

Both halves are causal in time. The first frame is a latent frame of its own, each group of frames after it another.

Legend: B rows, C latent channels, F pixel frames, f latent frames, H W pixels, h w latent cells.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .clip_autoencoder import ClipAutoencoder
from .groups import frame_groups, walked
from .hunyuan_video_config import (
    CLASS_NAME,
    HunyuanVideoVAEConfig,
    read_hunyuan_video_vae_config,
    sized_hunyuan_video_vae_config,
)
from .hunyuan_video_keys import PREFIXES, hunyuan_video_vae_key_map
from .hunyuan_video_walk import Passage
from .latent_space import Scaled
from .loading import Checkpoints, module_on_meta


@dataclass(frozen=True, kw_only=True, eq=False)
class HunyuanVideoAutoencoder(ClipAutoencoder):
    """See `ClipAutoencoder`. A clip is worked on one latent frame at a time. What that takes, beside what goes in and
    comes out, grows with the clip's length by one state for each latent cell, which attention reads: with the published
    sizes by about 0.2 % for each latent frame. `slicing`, `tiling`: see `WanAutoencoder`.
    """

    config: HunyuanVideoVAEConfig

    @property
    def latent_channels(self) -> int:
        """C."""
        return self.config.latent_channels

    @property
    def downsampling(self) -> int:
        """Pixels a side per latent cell."""
        return self.config.spatial_compression_ratio

    @property
    def temporal_downsampling(self) -> int:
        """Frames per latent frame after the first, which is one frame."""
        return self.config.temporal_compression_ratio

    def stream_stretches(self, stretches: Iterable[Tensor]) -> Iterator[Tensor]:
        """See `ContinuingAutoencoder`."""
        groups = (group for latents in stretches for group in latents.split(1, dim=2))
        decoder = self.module.get_submodule("decoder")

        def run(x: Tensor, passage: Passage) -> Tensor:
            return passage.decoded(decoder, self._space(x.device).raw(x).to(self._dtype)).float()

        return walked(run, groups, self._parts(1, self.downsampling), Passage)

    def _stream(self, latents: Tensor) -> Iterator[Tensor]:
        return self.stream_stretches((latents,))

    def _moments(self, pixels: Tensor) -> Tensor:
        groups, encoder = frame_groups(pixels, self.temporal_downsampling), self.module.get_submodule("encoder")

        def run(x: Tensor, passage: Passage) -> Tensor:
            return passage.encoded(encoder, x.to(self._dtype)).float()

        return torch.cat([*walked(run, groups, self._parts(self.downsampling, 1), Passage)], dim=2)

    def _space(self, device: torch.device) -> Scaled:
        return Scaled(scale=self.config.scaling_factor)


def _build(config: HunyuanVideoVAEConfig) -> nn.Module:
    """diffusers' module on the meta device. Raises ValueError for sizes that make none."""
    from diffusers.models.autoencoders import autoencoder_kl_hunyuanvideo15 as theirs

    return module_on_meta(CLASS_NAME, theirs.AutoencoderKLHunyuanVideo15, config.entries())


_CHECKPOINTS = Checkpoints(
    config_of_folder=read_hunyuan_video_vae_config,
    config_of_shapes=sized_hunyuan_video_vae_config,
    prefixes=PREFIXES,
    build=_build,
    key_map=lambda module, _: hunyuan_video_vae_key_map(module),
    wrap=HunyuanVideoAutoencoder,
)
load_hunyuan_video_vae = _CHECKPOINTS.load_folder
load_hunyuan_video_vae_file = _CHECKPOINTS.load_file
"""Of a file in Tencent's layout or diffusers'."""
