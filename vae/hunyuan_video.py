"""The video autoencoder of HunyuanVideo 1.5: diffusers' `AutoencoderKLHunyuanVideo15` behind our interface.

Both halves are causal in time. The first frame is a latent frame of its own, each group of frames after it another.

Legend: B rows, C latent channels, F pixel frames, f latent frames, H W pixels, h w latent cells.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..core.checkpoint import Files
from ..core.component_files import component_weights
from ..core.diffusers_config import made
from ..core.loading import build_on_meta, load_weights
from ..core.naming import naming
from ..core.saving import Component
from ..core.shapes import Shapes
from .groups import check_pixels, check_values, frame_groups, put_together, walked
from .hunyuan_video_config import (
    CLASS_NAME,
    HunyuanVideoVAEConfig,
    read_hunyuan_video_vae_config,
    sized_hunyuan_video_vae_config,
)
from .hunyuan_video_keys import PREFIXES, hunyuan_video_vae_key_map
from .hunyuan_video_walk import Passage
from .kl import autoencoder_component, drawn_latents, mean_and_std
from .tiling import InParts, Tiling


@dataclass(frozen=True, kw_only=True, eq=False)
class HunyuanVideoAutoencoder:
    """Maps clips in -1..1 to normalised latents and back. Nothing changes in a call, so threads may share it.

    `module` holds the weights, by diffusers' names, and computes in their dtype. Whatever comes in is cast to that;
    results are float32. A clip is worked on one latent frame at a time. What that takes, beside what goes in and comes
    out, grows with the clip's length by one state for each latent cell, which attention reads: with the published sizes
    by about 0.2 % for each latent frame.

    `slicing`, `tiling`: see `WanAutoencoder`.
    """

    module: nn.Module
    config: HunyuanVideoVAEConfig
    tiling: Tiling | None = None
    slicing: bool = False

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
        """Mean and standard deviation [B, C, f, h, w], scaled, of the latents of pixels. Raises as `encode`."""
        check_pixels(pixels, self.downsampling, self.temporal_downsampling)
        groups, encoder = frame_groups(pixels, self.temporal_downsampling), self.module.get_submodule("encoder")

        def run(x: Tensor, passage: Passage) -> Tensor:
            return passage.encoded(encoder, x.to(self._dtype)).float()

        mean, std = mean_and_std(torch.cat([*walked(run, groups, self._parts(self.downsampling, 1), Passage)], dim=2))
        return mean * self.config.scaling_factor, std * self.config.scaling_factor

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, F, H, W], about -1..1, of latents [B, C, f, h, w]. Raises ValueError for another shape, or
        numbers that are not floating-point."""
        return put_together(self.stream_decode(latents), latents, self.downsampling, self.temporal_downsampling)

    def stream_decode(self, latents: Tensor) -> Iterator[Tensor]:
        """What `decode` gives, in groups of frames as they are ready: the first frame, then `temporal_downsampling`
        frames for each other latent frame. Raises at once what `decode` raises."""
        check_values("latents", latents, self.latent_channels)
        return self.stream_stretches((latents,))

    def stream_stretches(self, stretches: Iterable[Tensor]) -> Iterator[Tensor]:
        """See `ContinuingAutoencoder`."""
        groups = (group for latents in stretches for group in latents.split(1, dim=2))
        decoder = self.module.get_submodule("decoder")

        def run(x: Tensor, passage: Passage) -> Tensor:
            return passage.decoded(decoder, (x.float() / self.config.scaling_factor).to(self._dtype)).float()

        return walked(run, groups, self._parts(1, self.downsampling), Passage)

    def _parts(self, unit_in: int, unit_out: int) -> InParts:
        return InParts(tiling=self.tiling, slicing=self.slicing, unit_in=unit_in, unit_out=unit_out)

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.module.parameters()).dtype


def load_hunyuan_video_vae(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    variant: str | None = None,
    tiling: Tiling | None = None,
    slicing: bool = False,
) -> HunyuanVideoAutoencoder:
    """The autoencoder of a folder in diffusers' layout; arguments and errors as for `load_kl`."""
    folder = Path(folder)
    config = read_hunyuan_video_vae_config(folder)
    files = component_weights(folder, variant)
    with naming(folder / "config.json"):
        module = _build(config)
    return _loaded(module, config, files, device=device, dtype=dtype, tiling=tiling, slicing=slicing)


def load_hunyuan_video_vae_file(
    files: Files,
    config: HunyuanVideoVAEConfig | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    tiling: Tiling | None = None,
    slicing: bool = False,
) -> HunyuanVideoAutoencoder:
    """The autoencoder of a file in Tencent's layout or diffusers'; `config` None: the published one, with the sizes
    that it shows. Errors as for `load_kl`."""
    config = sized_hunyuan_video_vae_config(Shapes.read(files, PREFIXES)) if config is None else config
    return _loaded(_build(config), config, files, device=device, dtype=dtype, tiling=tiling, slicing=slicing)


def _loaded(
    module: nn.Module,
    config: HunyuanVideoVAEConfig,
    files: Files,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    tiling: Tiling | None,
    slicing: bool,
) -> HunyuanVideoAutoencoder:
    load_weights(module, files, hunyuan_video_vae_key_map(module), dtype=dtype, device=device)
    module = module.requires_grad_(False).eval()
    return HunyuanVideoAutoencoder(module=module, config=config, tiling=tiling, slicing=slicing)


def _build(config: HunyuanVideoVAEConfig) -> nn.Module:
    """diffusers' module on the meta device. Raises ValueError for sizes that make none."""
    from diffusers.models.autoencoders import autoencoder_kl_hunyuanvideo15 as theirs

    build: Callable[..., nn.Module] = theirs.AutoencoderKLHunyuanVideo15
    return made(CLASS_NAME, lambda: build_on_meta(lambda: build(**config.entries())))
