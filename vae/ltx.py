"""The video autoencoders of LTX-Video: diffusers' `AutoencoderKLLTXVideo` behind our interface.

The first frame is a latent frame of its own, each group of frames after it another. From 0.9.1 on, the decoder takes
the last noise away as well: it is told a time, and latents are mixed with noise before.

Legend: B rows, C latent channels, F pixel frames, f latent frames, H W pixels, h w latent cells.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from ..core.checkpoint import Files
from ..core.component_files import component_weights
from ..core.diffusers_config import made
from ..core.loading import build_on_meta, load_weights
from ..core.naming import naming
from ..core.saving import Component
from ..core.shapes import Shapes
from .groups import check_pixels, check_values, put_together
from .kl import autoencoder_component, drawn_latents, mean_and_std
from .ltx_config import CLASS_NAME, LTXVAEConfig, read_ltx_vae_config
from .ltx_decoder import LTXDecoding
from .ltx_keys import PREFIXES, ltx_key_map
from .ltx_shapes import sized_ltx_vae_config
from .tiling import InParts, Tiling

NOISE_SEED = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class LTXAutoencoder:
    """Maps clips in -1..1 to normalised latents and back. Nothing changes in a call, so threads may share it.

    `module` holds the weights, by diffusers' names, and computes in their dtype. Whatever comes in is cast to that;
    results are float32. A clip is decoded frame by frame, so that the memory that it takes, beside what goes in and
    comes out, does not grow with its length; it is encoded as a whole.

    `time`: what a decoder is told that is told one. Some (0.9.1) add noise of their own in their layers, which is the
    same in every call. `slicing`: row by row. `tiling`: also tile by tile, whose convolutions see nothing beyond them,
    which changes the result: see `KLAutoencoder`.
    """

    module: nn.Module
    config: LTXVAEConfig
    tiling: Tiling | None = None
    slicing: bool = False
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
        mean, std = self._statistics(latents.device)
        mixed = (1 - share) * (latents.float() * std + mean) + share * noise
        return (mixed - mean) / std

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
        encoder = self.module.get_submodule("encoder")
        parts = InParts(tiling=self.tiling, slicing=self.slicing, unit_in=self.downsampling, unit_out=1)
        mean, std = mean_and_std(parts(lambda part: encoder(part.to(self._dtype)).float(), pixels))
        shift, scale = self._statistics(mean.device)
        return (mean - shift) / scale, std / scale

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, F, H, W], about -1..1, of latents [B, C, f, h, w]. Raises ValueError for another shape, or
        numbers that are not floating-point."""
        return put_together(self.stream_decode(latents), latents, self.downsampling, self.temporal_downsampling)

    def stream_decode(self, latents: Tensor) -> Iterator[Tensor]:
        """What `decode` gives, frame by frame as they are ready. Raises at once what `decode` raises."""
        check_values("latents", latents, self.latent_channels)
        mean, std = self._statistics(latents.device)
        return self._decoded((latents.float() * std + mean).to(self._dtype))

    def _decoded(self, latents: Tensor) -> Iterator[Tensor]:
        """Frames [B, 3, 1, H, W], float32, of raw latents, part by part as the options say; each part is a stream."""
        parts = InParts(tiling=self.tiling, slicing=self.slicing, unit_in=1, unit_out=self.downsampling)
        decoder = self.module.get_submodule("decoder")
        streams = cycle([self._decoding(decoder)(part) for part in parts.cut(latents)])
        for _ in range(self._num_frames(latents)):
            yield parts(lambda _: next(next(streams)).float(), latents[:, :, :1])

    def _decoding(self, decoder: nn.Module) -> LTXDecoding:
        return LTXDecoding(decoder=decoder, time=self.time, noise=torch.Generator().manual_seed(NOISE_SEED))

    def _num_frames(self, latents: Tensor) -> int:
        return 1 + (latents.shape[2] - 1) * self.temporal_downsampling

    def _statistics(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean and deviation, each [1, C, 1, 1, 1], float32."""
        both = (self.module.get_buffer(name) for name in ("latents_mean", "latents_std"))
        mean, std = (each.to(device, torch.float32).view(1, -1, 1, 1, 1) for each in both)
        return mean, std

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.module.parameters()).dtype


def load_ltx_vae(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    variant: str | None = None,
    tiling: Tiling | None = None,
    slicing: bool = False,
) -> LTXAutoencoder:
    """The autoencoder of a folder in diffusers' layout; arguments and errors as for `load_kl`."""
    folder = Path(folder)
    config = read_ltx_vae_config(folder)
    files = component_weights(folder, variant)
    with naming(folder / "config.json"):
        module = _build(config)
    return _loaded(module, config, files, device=device, dtype=dtype, tiling=tiling, slicing=slicing)


def load_ltx_vae_file(
    files: Files,
    config: LTXVAEConfig | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    tiling: Tiling | None = None,
    slicing: bool = False,
) -> LTXAutoencoder:
    """The autoencoder of a file in Lightricks' layout, alone or beside a denoiser, or diffusers'; `config` None: of the
    sizes that a file in Lightricks' layout shows. Errors as for `load_kl`."""
    config = sized_ltx_vae_config(Shapes.read(files, PREFIXES)) if config is None else config
    return _loaded(_build(config), config, files, device=device, dtype=dtype, tiling=tiling, slicing=slicing)


def _loaded(
    module: nn.Module,
    config: LTXVAEConfig,
    files: Files,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    tiling: Tiling | None,
    slicing: bool,
) -> LTXAutoencoder:
    load_weights(module, files, ltx_key_map(module, config), dtype=dtype, device=device)
    return LTXAutoencoder(module=module.requires_grad_(False).eval(), config=config, tiling=tiling, slicing=slicing)


def _build(config: LTXVAEConfig) -> nn.Module:
    """diffusers' module on the meta device. Raises ValueError for sizes that make none."""
    from diffusers.models.autoencoders import autoencoder_kl_ltx as theirs

    build = cast(Callable[..., nn.Module], cast(Any, theirs).AutoencoderKLLTXVideo)
    return made(CLASS_NAME, lambda: build_on_meta(lambda: build(**config.entries())))
