"""The sizes of an `AutoencoderKL`, and reading them from diffusers' config.json."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.diffusers_config import FLAG, NUMBER, NUMBERS, POSITIVE, SIZE, SIZES, WORD, Kind, known_entries, read_config

CLASS_NAME = "AutoencoderKL"
_BLOCK_TYPES = {"down_block_types": "DownEncoderBlock2D", "up_block_types": "UpDecoderBlock2D"}


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """diffusers' entries by diffusers' names and, but for `force_upcast`, with its defaults.

    Latents are (z - shift_factor) * scaling_factor, or per channel (z - latents_mean) * scaling_factor / latents_std.
    `force_upcast`: computed in float32 where float16 is asked for. diffusers minds it in SDXL's pipelines only and
    takes a missing entry as true; here it holds for every family, and missing is false.

    Raises ValueError for entries that contradict each other.
    """

    in_channels: int = 3
    out_channels: int = 3
    latent_channels: int = 4
    block_out_channels: tuple[int, ...] = (64,)
    layers_per_block: int = 1
    norm_num_groups: int = 32
    act_fn: str = "silu"
    scaling_factor: float = 0.18215
    shift_factor: float | None = None
    latents_mean: tuple[float, ...] | None = None
    latents_std: tuple[float, ...] | None = None
    force_upcast: bool = False
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True
    mid_block_add_attention: bool = True

    def __post_init__(self) -> None:
        if (self.latents_mean is None) != (self.latents_std is None):
            raise ValueError("latents_mean and latents_std must be given together")
        for name, values in (("latents_mean", self.latents_mean), ("latents_std", self.latents_std)):
            if values is not None and len(values) != self.latent_channels:
                raise ValueError(f"{name} has {len(values)} values; there are {self.latent_channels} latent channels")
        if self.latents_mean is not None and self.shift_factor:
            raise ValueError(f"shift_factor is {self.shift_factor} and latents_mean is given: only one can be")
        if self.latents_std is not None and min(self.latents_std) <= 0:
            raise ValueError(f"latents_std is {list(self.latents_std)}; all must be over 0")

    @property
    def downsampling(self) -> int:
        """Pixels a side per latent cell."""
        return 2 ** (len(self.block_out_channels) - 1)

    @property
    def shift(self) -> tuple[float, ...]:
        """What is taken from each raw channel."""
        return self.latents_mean or (self.shift_factor or 0.0,) * self.latent_channels

    @property
    def scale(self) -> tuple[float, ...]:
        """What each channel is multiplied by then."""
        return tuple(self.scaling_factor / std for std in self.latents_std or (1.0,) * self.latent_channels)

    def entries(self) -> dict[str, Any]:
        """The arguments of diffusers' class."""
        levels = len(self.block_out_channels)
        return {**dataclasses.asdict(self), **{key: (kind,) * levels for key, kind in _BLOCK_TYPES.items()}}


def read_kl_config(folder: Path) -> KLConfig:
    """The config of a folder in diffusers' layout.

    Raises:
        FileNotFoundError: it has no config.json. ValueError: that is not the config of an `AutoencoderKL`, or has an
        entry that is not known or of another type.
    """
    return read_config(folder, "an autoencoder", kl_config)


def kl_config(entries: Mapping[str, object]) -> KLConfig:
    """The config that the entries of a config.json say. Raises ValueError as `read_kl_config` does."""
    skipped = ("sample_size", *_BLOCK_TYPES)
    config = KLConfig(**known_entries(entries, CLASS_NAME, _KINDS, skipped=skipped, may_be_null=_MAY_BE_NULL))
    for key, kind in _BLOCK_TYPES.items():
        wanted = [kind] * len(config.block_out_channels)
        if entries.get(key, [kind]) != wanted:
            raise ValueError(f"the config's {key} is {entries.get(key, [kind])!r}; only {wanted} is supported")
    return config


_MAY_BE_NULL = ("shift_factor", "latents_mean", "latents_std")
_KINDS: Mapping[str, Kind] = {
    "in_channels": SIZE,
    "out_channels": SIZE,
    "latent_channels": SIZE,
    "block_out_channels": SIZES,
    "layers_per_block": SIZE,
    "norm_num_groups": SIZE,
    "act_fn": WORD,
    "scaling_factor": POSITIVE,
    "shift_factor": NUMBER,
    "latents_mean": NUMBERS,
    "latents_std": NUMBERS,
    "force_upcast": FLAG,
    "use_quant_conv": FLAG,
    "use_post_quant_conv": FLAG,
    "mid_block_add_attention": FLAG,
}

_LEVELS = (128, 256, 512, 512)
SD_1 = KLConfig(block_out_channels=_LEVELS, layers_per_block=2)
"""Stable Diffusion 1.5."""
SDXL = KLConfig(block_out_channels=_LEVELS, layers_per_block=2, scaling_factor=0.13025, force_upcast=True)
"""Stable Diffusion XL, base and refiner."""
SD_3 = KLConfig(
    block_out_channels=_LEVELS,
    layers_per_block=2,
    latent_channels=16,
    scaling_factor=1.5305,
    shift_factor=0.0609,
    force_upcast=True,
    use_quant_conv=False,
    use_post_quant_conv=False,
)
"""Stable Diffusion 3 and 3.5."""
FLUX_1 = dataclasses.replace(SD_3, scaling_factor=0.3611, shift_factor=0.1159)
"""FLUX.1 and Z-Image."""
