"""The video autoencoders of Wan 2.1 and 2.2: diffusers' `AutoencoderKLWan` behind our interface.

Both halves are causal in time. The first frame is a latent frame of its own, each group of frames after it another; a
group sees what went before through caches of the last frames of every convolution's input.

Legend: B rows, C latent channels, F pixel frames, f latent frames, H W pixels, h w latent cells.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.checkpoint import Files
from ..core.component_files import component_weights
from ..core.diffusers_config import made
from ..core.loading import build_on_meta, load_weights
from ..core.naming import naming
from ..core.saving import Component
from ..core.shapes import Shapes
from .causal_conv import CausalConv, with_causal_convs
from .groups import check_pixels, check_values, frame_groups, put_together, walked
from .kl import autoencoder_component, drawn_latents, mean_and_std
from .tiling import InParts, Tiling
from .wan_config import CLASS_NAME, WanVAEConfig, read_wan_vae_config, sized_wan_vae_config
from .wan_keys import PREFIXES, wan_key_map

Caches = list[Any]
"""What diffusers' halves keep of one clip: one place for each causal convolution, None before the first frame."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WanAutoencoder:
    """Maps clips in -1..1 to normalised latents and back. Nothing changes in a call, so threads may share it: the
    caches, which diffusers keeps in the module, belong to the call.

    `module` holds the weights, by diffusers' names, and computes in their dtype. Whatever comes in is cast to that;
    results are float32. A clip is worked on one latent frame at a time, so that the memory that it takes, beside what
    goes in and comes out, does not grow with its length.

    `slicing`: row by row. `tiling`: also tile by tile. Frames still come in groups, so that the caches of all rows and
    tiles are held; what is worked on at a time is one of them. Attention then sees a tile only, and convolutions
    nothing beyond it, which changes the result: see `KLAutoencoder`.
    """

    module: nn.Module
    config: WanVAEConfig
    tiling: Tiling | None = None
    slicing: bool = False

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
        groups = frame_groups(pixels, self.temporal_downsampling)
        encoded = self._walked("encoder", self._encoded, groups, (self.downsampling, 1))
        mean, std = mean_and_std(torch.cat(list(encoded), dim=2))
        shift, scale = self._statistics(mean.device)
        return (mean - shift) / scale, std / scale

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
        groups = (group for latents in stretches for group in self._raw(latents).split(1, dim=2))
        return self._walked("decoder", self._decoded, groups, (1, self.downsampling))

    def _raw(self, latents: Tensor) -> Tensor:
        """Normalised latents [B, C, f, h, w] as the decoder takes them, float32."""
        shift, scale = self._statistics(latents.device)
        return latents.float() * scale + shift

    def _statistics(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean and deviation, each [1, C, 1, 1, 1], float32."""
        both = (self.config.latents_mean, self.config.latents_std)
        mean, std = torch.tensor(both, dtype=torch.float32, device=device).view(2, 1, -1, 1, 1, 1)
        return mean, std

    def _walked(
        self, half: str, run: Callable[[Tensor, Caches], Tensor], groups: Iterable[Tensor], units: tuple[int, int]
    ) -> Iterator[Tensor]:
        """`run` on each group of frames, part by part as the options say, each part with the caches that it left.
        `units` are those of what goes in and comes out."""
        unit_in, unit_out = units
        parts = InParts(tiling=self.tiling, slicing=self.slicing, unit_in=unit_in, unit_out=unit_out)
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

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.module.parameters()).dtype


def load_wan_vae(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    variant: str | None = None,
    tiling: Tiling | None = None,
    slicing: bool = False,
) -> WanAutoencoder:
    """The autoencoder of a folder in diffusers' layout; arguments and errors as for `load_kl`."""
    folder = Path(folder)
    config = read_wan_vae_config(folder)
    files = component_weights(folder, variant)
    with naming(folder / "config.json"):
        module = _build(config)
    return _loaded(module, config, files, device=device, dtype=dtype, tiling=tiling, slicing=slicing)


def load_wan_vae_file(
    files: Files,
    config: WanVAEConfig | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    tiling: Tiling | None = None,
    slicing: bool = False,
) -> WanAutoencoder:
    """The autoencoder of a file in Wan's layout, as ComfyUI has it, or diffusers'; `config` None: of the sizes that it
    shows, with the statistics of Wan 2.1 or 2.2. Errors as for `load_kl`."""
    config = sized_wan_vae_config(Shapes.read(files, PREFIXES)) if config is None else config
    return _loaded(_build(config), config, files, device=device, dtype=dtype, tiling=tiling, slicing=slicing)


def _loaded(
    module: nn.Module,
    config: WanVAEConfig,
    files: Files,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    tiling: Tiling | None,
    slicing: bool,
) -> WanAutoencoder:
    key_map = wan_key_map(
        module, num_levels=len(config.dim_mult), num_res_blocks=config.num_res_blocks, nested=config.is_residual
    )
    load_weights(module, files, key_map, dtype=dtype, device=device)
    return WanAutoencoder(module=module.requires_grad_(False).eval(), config=config, tiling=tiling, slicing=slicing)


def _build(config: WanVAEConfig) -> nn.Module:
    """diffusers' module on the meta device. Raises ValueError for sizes that make none."""
    from diffusers.models.autoencoders import autoencoder_kl_wan as theirs

    build: Callable[..., nn.Module] = theirs.AutoencoderKLWan
    module = made(CLASS_NAME, lambda: build_on_meta(lambda: build(**config.entries())))
    return with_causal_convs(module, theirs.WanCausalConv3d)


def _folded(pixels: Tensor, patch: int) -> Tensor:
    """[B, 3, F, H, W] to [B, 3 p^2, F, H / p, W / p]: a patch is read column by column."""
    return functional.pixel_unshuffle(pixels.transpose(1, 2).mT, patch).mT.transpose(1, 2)


def _unfolded(folded: Tensor, patch: int) -> Tensor:
    """The inverse of `_folded`."""
    return functional.pixel_shuffle(folded.transpose(1, 2).mT, patch).mT.transpose(1, 2)
