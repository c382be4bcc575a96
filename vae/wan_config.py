"""The sizes of an `AutoencoderKLWan`, and reading them from diffusers' config.json or from a file's tensors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.diffusers_config import FLAG, FLAGS, NUMBERS, SIZE, SIZES, Kind, known_entries, listed, read_config
from ..core.shapes import Shapes

CLASS_NAME = "AutoencoderKLWan"

# fmt: off
WAN_2_1_MEAN = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)
WAN_2_1_STD = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)
WAN_2_2_MEAN = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891,
    0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
    -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723,
    -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
)
WAN_2_2_STD = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
    0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
    0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
    0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
)
# fmt: on


@dataclass(frozen=True, kw_only=True)
class WanVAEConfig:
    """diffusers' entries by diffusers' names and with its defaults, those of Wan 2.1; latents are
    (z - latents_mean) / latents_std.

    `is_residual` is Wan 2.2's kind, which has shortcuts around its levels and sees `patch_size` x `patch_size` pixels
    as one. The scale factors say again what the levels say: pixels a side, and frames, per latent cell.

    Raises ValueError for entries that contradict each other.
    """

    base_dim: int = 96
    decoder_base_dim: int | None = None
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temperal_downsample: tuple[bool, ...] = (False, True, True)
    latents_mean: tuple[float, ...] = WAN_2_1_MEAN
    latents_std: tuple[float, ...] = WAN_2_1_STD
    is_residual: bool = False
    in_channels: int = 3
    out_channels: int = 3
    patch_size: int | None = None
    scale_factor_temporal: int = 4
    scale_factor_spatial: int = 8

    def __post_init__(self) -> None:
        if len(self.temperal_downsample) != len(self.dim_mult) - 1:
            counts = f"{len(self.temperal_downsample)} entries for {len(self.dim_mult)} of dim_mult"
            raise ValueError(f"temperal_downsample has {counts}; it has one for each but the last")
        for name, values in (("latents_mean", self.latents_mean), ("latents_std", self.latents_std)):
            if len(values) != self.z_dim:
                raise ValueError(f"{name} has {len(values)} values; there are {self.z_dim} latent channels")
        if min(self.latents_std) <= 0:
            raise ValueError(f"latents_std is {list(self.latents_std)}; all must be over 0")
        for name, given, needed in (
            ("in_channels", self.in_channels, 3 * self.patch**2),
            ("out_channels", self.out_channels, 3 * self.patch**2),
            ("scale_factor_temporal", self.scale_factor_temporal, 2 ** sum(self.temperal_downsample)),
            ("scale_factor_spatial", self.scale_factor_spatial, self.patch * 2 ** (len(self.dim_mult) - 1)),
        ):
            if given != needed:
                raise ValueError(f"{name} is {given}; it must be {needed} by the levels and patch_size")

    @property
    def patch(self) -> int:
        """Pixels a side that the convolutions see as one."""
        return self.patch_size or 1

    def entries(self) -> dict[str, Any]:
        """The arguments of diffusers' class."""
        return listed(self)


WAN_2_1 = WanVAEConfig()
"""Wan 2.1, and the A14B models of Wan 2.2."""
WAN_2_2 = WanVAEConfig(
    base_dim=160,
    decoder_base_dim=256,
    z_dim=48,
    latents_mean=WAN_2_2_MEAN,
    latents_std=WAN_2_2_STD,
    is_residual=True,
    in_channels=12,
    out_channels=12,
    patch_size=2,
    scale_factor_spatial=16,
)
"""Wan 2.2 TI2V-5B."""


def read_wan_vae_config(folder: Path) -> WanVAEConfig:
    """The config of a folder in diffusers' layout.

    Raises:
        FileNotFoundError: it has no config.json. ValueError: that is not the config of an `AutoencoderKLWan`, or has an
        entry that is not known or of another type.
    """
    return read_config(folder, "an autoencoder", wan_vae_config)


def wan_vae_config(entries: Mapping[str, object]) -> WanVAEConfig:
    """The config that the entries of a config.json say. Raises ValueError as `read_wan_vae_config` does."""
    taken = {name: value for name, value in entries.items() if (name, value) != ("attn_scales", [])}
    values = known_entries(
        taken,
        CLASS_NAME,
        _KINDS,
        skipped=("dropout", "clip_output"),  # the latter is in Wan 2.2's file; nothing reads it
        may_be_null=("decoder_base_dim", "patch_size"),
    )
    return WanVAEConfig(**values)


def sized_wan_vae_config(shapes: Shapes) -> WanVAEConfig:
    """The published config of the kind that shapes in Wan's layout or diffusers' show, with their sizes.

    Raises:
        ValueError: they are not those of such an autoencoder, or make no sense.
    """
    first = shapes.of("encoder.conv1.weight", "encoder.conv_in.weight", axes=5)
    nested = shapes.has(
        "encoder.downsamples.0.downsamples.0.residual.2.weight", "encoder.down_blocks.0.resnets.0.conv1.weight"
    )
    usual = WAN_2_2 if nested else WAN_2_1
    blocks, levels, halvings = (_nested_levels if nested else listed_levels)(shapes)
    patch, decoder = math.isqrt(first[1] // 3), shapes.of("decoder.head.0.gamma", "decoder.norm_out.gamma", axes=4)[0]
    mult = tuple(level // first[0] for level in levels)
    return WanVAEConfig(
        base_dim=first[0],
        decoder_base_dim=None if decoder == first[0] * mult[0] else decoder // mult[0],
        z_dim=shapes.of("conv2.weight", "post_quant_conv.weight", axes=5)[0],
        dim_mult=mult,
        num_res_blocks=blocks,
        temperal_downsample=halvings,
        latents_mean=usual.latents_mean,
        latents_std=usual.latents_std,
        is_residual=nested,
        in_channels=first[1],
        out_channels=first[1],
        patch_size=None if patch == 1 else patch,
        scale_factor_temporal=2 ** sum(halvings),
        scale_factor_spatial=patch * 2 ** len(halvings),
    )


_Levels = tuple[int, tuple[int, ...], tuple[bool, ...]]
"""Resnets a level, each level's channels, and whether each halving between them halves the frames too."""


def listed_levels(shapes: Shapes) -> _Levels:
    """Those of Wan 2.1's kind: one list of resnets and halvings."""
    stem, conv = "encoder.down_blocks.", "conv1.weight"
    if shapes.has("encoder.conv1.weight"):
        stem, conv = "encoder.downsamples.", "residual.2.weight"
    halvings = [i for i in range(shapes.count(stem)) if shapes.has(f"{stem}{i}.resample.1.weight")]
    firsts = (0, *(i + 1 for i in halvings))
    channels = tuple(shapes.of(f"{stem}{i}.{conv}", axes=5)[0] for i in firsts)
    in_time = tuple(shapes.has(f"{stem}{i}.time_conv.weight") for i in halvings)
    return halvings[0] if halvings else shapes.count(stem), channels, in_time


def _nested_levels(shapes: Shapes) -> _Levels:
    """Wan 2.2: a list of levels."""
    original = shapes.has("encoder.conv1.weight")
    stem = "encoder.downsamples." if original else "encoder.down_blocks."
    inner, conv = ("downsamples", "residual.2.weight") if original else ("resnets", "conv1.weight")
    num_levels = shapes.count(stem)
    blocks = shapes.count(f"{stem}{num_levels - 1}.{inner}.")  # the last level has no halving
    halver = f"downsamples.{blocks}" if original else "downsampler"
    channels = tuple(shapes.of(f"{stem}{i}.{inner}.0.{conv}", axes=5)[0] for i in range(num_levels))
    return blocks, channels, tuple(shapes.has(f"{stem}{i}.{halver}.time_conv.weight") for i in range(num_levels - 1))


_KINDS: Mapping[str, Kind] = {
    "base_dim": SIZE,
    "decoder_base_dim": SIZE,
    "z_dim": SIZE,
    "dim_mult": SIZES,
    "num_res_blocks": SIZE,
    "temperal_downsample": FLAGS,
    "latents_mean": NUMBERS,
    "latents_std": NUMBERS,
    "is_residual": FLAG,
    "in_channels": SIZE,
    "out_channels": SIZE,
    "patch_size": SIZE,
    "scale_factor_temporal": SIZE,
    "scale_factor_spatial": SIZE,
}
