"""The autoencoder of Qwen-Image, for pictures: diffusers' `AutoencoderKLQwenImage` behind our interface.

It is that of Wan 2.1, causal in time. A picture is its first frame: before it there is nothing, so that of every
convolution the last slice in time alone counts, and no cache of earlier frames is needed.

Legend: B rows, C channels, H W pixels, h w latent cells.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.checkpoint import Files
from ..core.component_files import component_weights
from ..core.diffusers_config import FLAGS, NUMBERS, SIZE, SIZES, Kind, known_entries, made, read_config
from ..core.loading import build_on_meta, load_weights
from ..core.naming import naming
from ..core.shapes import Shapes
from .causal_conv import with_causal_convs
from .kl import KLAutoencoder
from .kl_config import KLConfig
from .tiling import Tiling
from .wan_config import WAN_2_1_MEAN, WAN_2_1_STD
from .wan_keys import wan_key_map

CLASS_NAME = "AutoencoderKLQwenImage"


@dataclass(frozen=True, kw_only=True)
class QwenImageVAEConfig:
    """diffusers' entries by diffusers' names and with its defaults; latents are (z - latents_mean) / latents_std.

    Raises ValueError for entries that contradict each other.
    """

    base_dim: int = 96
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temperal_downsample: tuple[bool, ...] = (False, True, True)
    input_channels: int = 3
    latents_mean: tuple[float, ...] = WAN_2_1_MEAN
    latents_std: tuple[float, ...] = WAN_2_1_STD

    def __post_init__(self) -> None:
        if len(self.temperal_downsample) != len(self.dim_mult) - 1:
            counts = f"{len(self.temperal_downsample)} entries for {len(self.dim_mult)} of dim_mult"
            raise ValueError(f"temperal_downsample has {counts}; it has one for each but the last")
        if self.input_channels != 3:
            raise ValueError(f"input_channels is {self.input_channels}; only pictures of 3 can be made")
        self.space()

    def space(self) -> KLConfig:
        """What is common to all autoencoders of this kind: channels, levels, and the latents' means and deviations."""
        return KLConfig(
            latent_channels=self.z_dim,
            block_out_channels=tuple(self.base_dim * each for each in self.dim_mult),
            layers_per_block=self.num_res_blocks,
            scaling_factor=1.0,
            latents_mean=self.latents_mean,
            latents_std=self.latents_std,
        )


def read_qwen_image_vae_config(folder: Path) -> QwenImageVAEConfig:
    """The config of a folder in diffusers' layout.

    Raises:
        FileNotFoundError: it has no config.json. ValueError: that is not the config of an `AutoencoderKLQwenImage`, or
        has an entry that is not known or of another type.
    """
    return read_config(folder, "an autoencoder", _config)


def sized_qwen_image_vae_config(shapes: Shapes) -> QwenImageVAEConfig:
    """The published config with the sizes that shapes show, in either layout.

    Raises:
        ValueError: they are not those of such an autoencoder, or make no sense.
    """
    level, conv = "encoder.down_blocks.", "conv1.weight"
    if shapes.has("encoder.conv1.weight"):
        level, conv = "encoder.downsamples.", "residual.2.weight"
    base = shapes.of("encoder.conv1.weight", "encoder.conv_in.weight", axes=5)[0]
    halvings = [i for i in range(shapes.count(level)) if shapes.has(f"{level}{i}.resample.1.weight")]
    firsts = (0, *(i + 1 for i in halvings))
    return QwenImageVAEConfig(
        base_dim=base,
        z_dim=shapes.of("conv2.weight", "post_quant_conv.weight", axes=5)[0],
        dim_mult=tuple(shapes.of(f"{level}{i}.{conv}", axes=5)[0] // base for i in firsts),
        num_res_blocks=halvings[0] if halvings else shapes.count(level),
        temperal_downsample=tuple(shapes.has(f"{level}{i}.time_conv.weight") for i in halvings),
    )


class QwenImageAutoencoder(KLAutoencoder):
    """Maps pictures in -1..1 to normalised latents and back, as `KLAutoencoder` does; `config` is its latent space."""

    def _half(self, *names: str | None) -> nn.Module:
        return _OneFrame(super()._half(*names))


def load_qwen_image_vae(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    variant: str | None = None,
    tiling: Tiling | None = None,
    slicing: bool = False,
) -> QwenImageAutoencoder:
    """The autoencoder of a folder in diffusers' layout; arguments and errors as for `load_kl`."""
    folder = Path(folder)
    config = read_qwen_image_vae_config(folder)
    with naming(folder / "config.json"):
        module = _build(config)
    files = component_weights(folder, variant)
    return _loaded(module, config, files, device=device, dtype=dtype, tiling=tiling, slicing=slicing)


def load_qwen_image_vae_file(
    files: Files,
    config: QwenImageVAEConfig | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    tiling: Tiling | None = None,
    slicing: bool = False,
) -> QwenImageAutoencoder:
    """The autoencoder of a file in Wan's layout, as ComfyUI has it, or diffusers'; `config` None: of the sizes that it
    shows. Errors as for `load_kl`."""
    config = sized_qwen_image_vae_config(Shapes.read(files)) if config is None else config
    return _loaded(_build(config), config, files, device=device, dtype=dtype, tiling=tiling, slicing=slicing)


def _loaded(
    module: nn.Module,
    config: QwenImageVAEConfig,
    files: Files,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    tiling: Tiling | None,
    slicing: bool,
) -> QwenImageAutoencoder:
    key_map = wan_key_map(module, num_levels=len(config.dim_mult), num_res_blocks=config.num_res_blocks)
    load_weights(module, files, key_map, dtype=dtype, device=device)
    module.requires_grad_(False).eval()
    return QwenImageAutoencoder(module=module, config=config.space(), tiling=tiling, slicing=slicing)


class _OneFrame(nn.Module):
    """A network of clips as one of pictures."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] to [B, C', H', W']."""
        return self.network(x[:, :, None])[:, :, 0]


def _build(config: QwenImageVAEConfig) -> nn.Module:
    """diffusers' module on the meta device, for pictures. Raises ValueError for sizes that make none."""
    from diffusers.models.autoencoders import autoencoder_kl_qwenimage as theirs

    build: Any = theirs.AutoencoderKLQwenImage
    entries = {name: list(each) if isinstance(each, tuple) else each for name, each in vars(config).items()}
    module: nn.Module = made(CLASS_NAME, lambda: build_on_meta(lambda: build(**entries)))
    return with_causal_convs(module, theirs.QwenImageCausalConv3d)


def _config(entries: Mapping[str, object]) -> QwenImageVAEConfig:
    taken = {name: value for name, value in entries.items() if (name, value) != ("attn_scales", [])}
    return QwenImageVAEConfig(**known_entries(taken, CLASS_NAME, _KINDS, skipped=("dropout",)))


_KINDS: Mapping[str, Kind] = {
    "base_dim": SIZE,
    "z_dim": SIZE,
    "dim_mult": SIZES,
    "num_res_blocks": SIZE,
    "temperal_downsample": FLAGS,
    "input_channels": SIZE,
    "latents_mean": NUMBERS,
    "latents_std": NUMBERS,
}
