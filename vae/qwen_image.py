"""The autoencoder of Qwen-Image, for pictures: diffusers' `AutoencoderKLQwenImage` behind our interface.

It is that of Wan 2.1, causal in time. A picture is its first frame: before it there is nothing, so that of every
convolution the last slice in time alone counts, and no cache of earlier frames is needed.

Legend: B rows, C channels, H W pixels, h w latent cells.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from ..core.diffusers_config import FLAGS, NUMBERS, SIZE, SIZES, Kind, known_entries, listed, read_config
from ..core.key_map import KeyMap
from ..core.shapes import Shapes
from .causal_conv import with_causal_convs
from .kl import KLAutoencoder
from .kl_config import KLConfig
from .loading import Checkpoints, module_on_meta
from .tiling import Tiling
from .wan_config import WAN_2_1_MEAN, WAN_2_1_STD, listed_levels
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
    base = shapes.of("encoder.conv1.weight", "encoder.conv_in.weight", axes=5)[0]
    blocks, levels, halvings = listed_levels(shapes)
    return QwenImageVAEConfig(
        base_dim=base,
        z_dim=shapes.of("conv2.weight", "post_quant_conv.weight", axes=5)[0],
        dim_mult=tuple(level // base for level in levels),
        num_res_blocks=blocks,
        temperal_downsample=halvings,
    )


class QwenImageAutoencoder(KLAutoencoder):
    """Maps pictures in -1..1 to normalised latents and back, as `KLAutoencoder` does; `config` is its latent space."""

    def _half(self, *names: str | None) -> nn.Module:
        return _OneFrame(super()._half(*names))


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

    module = module_on_meta(CLASS_NAME, theirs.AutoencoderKLQwenImage, listed(config))
    return with_causal_convs(module, theirs.QwenImageCausalConv3d)


def _key_map(module: nn.Module, config: QwenImageVAEConfig) -> KeyMap:
    return wan_key_map(module, num_levels=len(config.dim_mult), num_res_blocks=config.num_res_blocks)


def _wrapped(
    *, module: nn.Module, config: QwenImageVAEConfig, tiling: Tiling | None, slicing: bool
) -> QwenImageAutoencoder:
    return QwenImageAutoencoder(module=module, config=config.space(), tiling=tiling, slicing=slicing)


_CHECKPOINTS = Checkpoints(
    config_of_folder=read_qwen_image_vae_config,
    config_of_shapes=sized_qwen_image_vae_config,
    build=_build,
    key_map=_key_map,
    wrap=_wrapped,
)
load_qwen_image_vae = _CHECKPOINTS.load_folder
load_qwen_image_vae_file = _CHECKPOINTS.load_file
"""Of a file in Wan's layout, as ComfyUI has it, or diffusers'."""


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
