"""The picture autoencoder of SD 1.5, SDXL, SD3 and FLUX.1: diffusers' `AutoencoderKL` behind our interface.

Legend: B rows, C latent channels, H W pixels, h w latent cells; a picture is a clip of one frame.
"""

import copy
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.checkpoint import Files
from ..core.component_files import component_weights
from ..core.copies import moved
from ..core.loading import load_weights
from ..core.naming import naming
from ..core.saving import Component
from .checks import check_floating, check_side, check_volume
from .kl_config import CLASS_NAME, KLConfig, read_kl_config
from .kl_keys import kl_key_map
from .latent_space import Scaled, drawn_latents, mean_and_std
from .loading import autoencoder_component, module_on_meta
from .tiling import InParts, Tiling


@dataclass(frozen=True, kw_only=True, eq=False)
class KLAutoencoder:
    """Maps pictures in -1..1 to normalised latents and back. Nothing changes in a call, so threads may share it.

    `module` holds the weights, by diffusers' names. It computes in their dtype, or in float32 where they are float16
    and the config says `force_upcast` (then with a copy of the half it needs, for that call: `load_kl` avoids that by
    keeping such weights in float32). Whatever comes in is cast to that; results are float32.

    `slicing`: row by row, in the memory of one picture. `tiling`: also tile by tile. Group norms and attention then see
    a tile only, which changes the result. Measured with random weights (four levels, 64x64 cells, a quarter shared),
    relative to the untiled result, for tiles of 24, 32 and 48 cells: 0.060, 0.037 and 0.012 decoding, 0.050, 0.041 and
    0.020 encoding. With given weights it may be another error: compare with `tiling=None` at a size that fits.
    """

    module: nn.Module
    config: KLConfig
    tiling: Tiling | None = None
    slicing: bool = False

    def moved(self, device: torch.device, dtype: torch.dtype | None) -> "KLAutoencoder":
        """A copy elsewhere; with `force_upcast`, weights that would be float16 become float32."""
        wide = dtype is torch.float16 and self.config.force_upcast
        return dataclasses.replace(self, module=moved(self.module, device, torch.float32 if wide else dtype))

    @property
    def latent_channels(self) -> int:
        """C."""
        return self.config.latent_channels

    @property
    def downsampling(self) -> int:
        """Pixels a side per latent cell."""
        return self.config.downsampling

    def component(self) -> Component:
        """See `Saveable`; the config is that of diffusers' module.

        Raises:
            ValueError: there is a tiling, which changes what is decoded and is in no file.
        """
        return autoencoder_component(self.module, self.tiling)

    def encode(self, pixels: Tensor, noise: Tensor | None = None) -> Tensor:
        """Latents [B, C, 1, h, w] of pixels [B, 3, 1, H, W]: the posterior's mean, or mean + std * `noise`.

        Raises ValueError for pixels or noise of another shape, sides that are no multiple of the downsampling, or
        numbers that are not floating-point.
        """
        return drawn_latents(*self.posterior(pixels), noise)

    def posterior(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation [B, C, 1, h, w], normalised, of the latents of pixels. Raises as `encode`."""
        _check("pixels", pixels, self.config.in_channels)
        for side, length in (("height", pixels.shape[3]), ("width", pixels.shape[4])):
            check_side(side, length, self.downsampling)
        encoder = self._half("encoder", "quant_conv" if self.config.use_quant_conv else None)
        moments = self._in_parts(encoder, pixels[:, :, 0], unit_in=self.downsampling, unit_out=1)
        mean, std = mean_and_std(moments[:, :, None])
        space = self._space(mean.device)
        return space.normalised(mean), space.deviation(std)

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, 1, H, W], about -1..1, of latents [B, C, 1, h, w]. Raises ValueError for another shape, or
        numbers that are not floating-point."""
        _check("latents", latents, self.latent_channels)
        raw = self._space(latents.device).raw(latents)
        decoder = self._half("post_quant_conv" if self.config.use_post_quant_conv else None, "decoder")
        return self._in_parts(decoder, raw[:, :, 0], unit_in=1, unit_out=self.downsampling)[:, :, None]

    def _space(self, device: torch.device) -> Scaled:
        both = torch.tensor((self.config.shift, self.config.scale), dtype=torch.float32, device=device)
        shift, scale = both.view(2, 1, -1, 1, 1, 1)
        return Scaled(shift=shift, scale=scale)

    def _half(self, *names: str | None) -> nn.Module:
        """The parts that are named, one after the other, in the dtype to compute in."""
        half = nn.Sequential(*(self.module.get_submodule(name) for name in names if name is not None))
        return _in_float32(half) if self.config.force_upcast and _dtype(half) == torch.float16 else half

    def _in_parts(self, network: nn.Module, x: Tensor, *, unit_in: int, unit_out: int) -> Tensor:
        """The network's result in float32, row by row and tile by tile as the options say."""
        dtype = _dtype(network)
        parts = InParts(tiling=self.tiling, slicing=self.slicing, unit_in=unit_in, unit_out=unit_out)
        return parts(lambda part: network(part.to(dtype)).float(), x)


def load_kl(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    variant: str | None = None,
    tiling: Tiling | None = None,
    slicing: bool = False,
) -> KLAutoencoder:
    """The autoencoder of a folder in diffusers' layout; `variant`, such as "fp16", picks one of several files.

    Everything is checked before anything is allocated.

    Raises:
        FileNotFoundError: a file is missing. ValueError: the config is of another class or makes no sense, or the
        weights are damaged, pickled, or do not fit the config.
    """
    folder = Path(folder)
    config = read_kl_config(folder)
    files = component_weights(folder, variant)
    with naming(folder / "config.json"):
        module = _build(config)
    return _loaded(module, config, files, device=device, dtype=dtype, tiling=tiling, slicing=slicing)


def load_kl_file(
    files: Files,
    config: KLConfig,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    tiling: Tiling | None = None,
    slicing: bool = False,
) -> KLAutoencoder:
    """The autoencoder of a file in the original layout (alone, or within a whole checkpoint) or diffusers' layout, for
    a known config (`SD_1`, `SDXL`, `SD_3`, `FLUX_1` of `kl_config`). Errors as for `load_kl`."""
    return _loaded(_build(config), config, files, device=device, dtype=dtype, tiling=tiling, slicing=slicing)


def _loaded(
    module: nn.Module,
    config: KLConfig,
    files: Files,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    tiling: Tiling | None,
    slicing: bool,
) -> KLAutoencoder:
    kept = torch.float32 if config.force_upcast and dtype == torch.float16 else dtype
    load_weights(module, files, kl_key_map(len(config.block_out_channels)), dtype=kept, device=device)
    return KLAutoencoder(module=module.requires_grad_(False).eval(), config=config, tiling=tiling, slicing=slicing)


def _build(config: KLConfig) -> nn.Module:
    """diffusers' module on the meta device. Raises ValueError for sizes that make none."""
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    return module_on_meta(CLASS_NAME, AutoencoderKL, config.entries())


def _dtype(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype


def _in_float32(module: nn.Module) -> nn.Module:
    """A copy; the original is left alone, as other threads may be using it."""
    memo: dict[int, Any] = {
        id(weight): nn.Parameter(weight.detach().float(), requires_grad=False) for weight in module.parameters()
    }
    return copy.deepcopy(module, memo)


def _check(name: str, x: Tensor, channels: int) -> None:
    check_volume(name, x, channels, frames="1")
    if x.shape[2] != 1:
        raise ValueError(
            f"{name} have {x.shape[2]} frames; this autoencoder takes pictures, which have 1: give it each frame as a"
            " row of its own"
        )
    check_floating(name, x)
