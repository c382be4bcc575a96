"""The sizes of an `AutoencoderKL` from the tensors of a single file, which has no config."""

import dataclasses

import torch

from ..core.checkpoint import Files
from ..core.shapes import Shapes
from .kl import KLAutoencoder, load_kl_file
from .kl_config import KLConfig
from .kl_keys import PREFIXES


def load_kl_like(
    files: Files,
    preset: KLConfig,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> KLAutoencoder:
    """The autoencoder of a file, alone or within a whole checkpoint, with a family's scale and shift of latents. Errors
    as for `load_kl`."""
    return load_kl_file(files, sized_kl_config(preset, Shapes.read(files, PREFIXES)), device=device, dtype=dtype)


def sized_kl_config(preset: KLConfig, shapes: Shapes) -> KLConfig:
    """The preset with the sizes that shapes show.

    Raises:
        ValueError: they are not those of an autoencoder, or make no sense.
    """
    original = "encoder.down.0.block.0.conv1.weight"
    level, block = ("encoder.down.", "block") if shapes.has(original) else ("encoder.down_blocks.", "resnets")
    widths = (shapes.of(f"{level}{i}.{block}.0.conv1.weight", axes=4)[0] for i in range(shapes.count(level)))
    return dataclasses.replace(
        preset,
        latent_channels=shapes.of("decoder.conv_in.weight", axes=4)[1],
        block_out_channels=tuple(widths),
        layers_per_block=shapes.count(f"{level}0.{block}."),
        use_quant_conv=shapes.has("quant_conv.weight"),
        use_post_quant_conv=shapes.has("post_quant_conv.weight"),
    )
