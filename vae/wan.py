"""The video autoencoders of Wan 2.1 and 2.2: diffusers' `AutoencoderKLWan` behind our interface.

Both halves are causal in time. The first frame is a latent frame of its own, each group of frames after it another; a
group sees what went before through caches of the last frames of every convolution's input.

Legend: B rows, C latent channels, F pixel frames, f latent frames, H W pixels, h w latent cells.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.key_map import KeyMap
from .causal_conv import CausalConv, with_causal_convs
from .clip_autoencoder import ClipAutoencoder
from .groups import frame_groups, walked
from .latent_space import Standardised
from .loading import Checkpoints, module_on_meta
from .tiling import InParts
from .wan_config import CLASS_NAME, WanVAEConfig, read_wan_vae_config, sized_wan_vae_config
from .wan_keys import PREFIXES, wan_key_map

Caches = list[Any]
"""What diffusers' halves keep of one clip: one place for each causal convolution, None before the first frame."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WanAutoencoder(ClipAutoencoder):
    """See `ClipAutoencoder`. The caches, which diffusers keeps in the module, belong to the call.

    A clip is worked on one latent frame at a time, so that the memory that it takes, beside what goes in and comes out,
    does not grow with its length. With `slicing` and `tiling` frames still come in groups, so that the caches of all
    rows and tiles are held; what is worked on at a time is one of them.
    """

    config: WanVAEConfig

    @property
    def latent_channels(self) -> int:
        """C."""
        return self.config.z_dim

    @property
    def downsampling(self) -> int:
        """Pixels a side per latent cell."""
        return self.config.scale_factor_spatial

    @property
    def temporal_downsampling(self) -> int:
        """Frames per latent frame after the first, which is one frame."""
        return self.config.scale_factor_temporal

    def stream_stretches(self, stretches: Iterable[Tensor]) -> Iterator[Tensor]:
        """See `ContinuingAutoencoder`."""
        raw = (self._space(latents.device).raw(latents) for latents in stretches)
        groups = (group for latents in raw for group in latents.split(1, dim=2))
        return self._walked("decoder", self._decoded, groups, self._parts(1, self.downsampling))

    def _stream(self, latents: Tensor) -> Iterator[Tensor]:
        return self.stream_stretches((latents,))

    def _moments(self, pixels: Tensor) -> Tensor:
        groups = frame_groups(pixels, self.temporal_downsampling)
        encoded = self._walked("encoder", self._encoded, groups, self._parts(self.downsampling, 1))
        return torch.cat(list(encoded), dim=2)

    def _space(self, device: torch.device) -> Standardised:
        both = (self.config.latents_mean, self.config.latents_std)
        mean, std = torch.tensor(both, dtype=torch.float32, device=device).view(2, 1, -1, 1, 1, 1)
        return Standardised(mean=mean, std=std)

    def _walked(
        self, half: str, run: Callable[[Tensor, Caches], Tensor], groups: Iterable[Tensor], parts: InParts
    ) -> Iterator[Tensor]:
        """`run` on each group of frames, part by part, each part with the caches that it left."""
        num_places = sum(isinstance(each, CausalConv) for each in self.module.get_submodule(half).modules())
        return walked(run, groups, parts, lambda: cast(Caches, [None] * num_places))

    def _encoded(self, pixels: Tensor, caches: Caches) -> Tensor:
        """Moments [B, 2 C, 1, h, w] of a group of frames, float32."""
        parts = cast(Any, self.module)
        x = _folded(pixels, self.config.patch).to(self._dtype)
        return parts.quant_conv(parts.encoder(x, feat_cache=caches, feat_idx=[0])).float()

    def _decoded(self, latents: Tensor, caches: Caches) -> Tensor:
        """A group of frames [B, 3, *, H, W], float32, of one of raw latents [B, C, 1, h, w]."""
        parts = cast(Any, self.module)
        x = parts.post_quant_conv(latents.to(self._dtype))
        frames = parts.decoder(x, feat_cache=caches, feat_idx=[0], first_chunk=caches[0] is None)
        return _unfolded(frames.float(), self.config.patch)


def _build(config: WanVAEConfig) -> nn.Module:
    """diffusers' module on the meta device. Raises ValueError for sizes that make none."""
    from diffusers.models.autoencoders import autoencoder_kl_wan as theirs

    module = module_on_meta(CLASS_NAME, theirs.AutoencoderKLWan, config.entries())
    return with_causal_convs(module, theirs.WanCausalConv3d)


def _key_map(module: nn.Module, config: WanVAEConfig) -> KeyMap:
    return wan_key_map(
        module, num_levels=len(config.dim_mult), num_res_blocks=config.num_res_blocks, nested=config.is_residual
    )


_CHECKPOINTS = Checkpoints(
    config_of_folder=read_wan_vae_config,
    config_of_shapes=sized_wan_vae_config,
    prefixes=PREFIXES,
    build=_build,
    key_map=_key_map,
    wrap=WanAutoencoder,
)
load_wan_vae = _CHECKPOINTS.load_folder
load_wan_vae_file = _CHECKPOINTS.load_file
"""Of a file in Wan's layout, as ComfyUI has it, or diffusers'; without a config, with the statistics of Wan 2.1 or
2.2."""


def _folded(pixels: Tensor, patch: int) -> Tensor:
    """[B, 3, F, H, W] to [B, 3 p^2, F, H / p, W / p]: a patch is read column by column."""
    return functional.pixel_unshuffle(pixels.transpose(1, 2).mT, patch).mT.transpose(1, 2)


def _unfolded(folded: Tensor, patch: int) -> Tensor:
    """The inverse of `_folded`."""
    return functional.pixel_shuffle(folded.transpose(1, 2).mT, patch).mT.transpose(1, 2)
