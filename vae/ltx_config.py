"""The sizes of an `AutoencoderKLLTXVideo`, and reading them from diffusers' config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ..core.diffusers_config import FLAG, FLAGS, POSITIVE, SIZE, SIZES, Kind, known_entries, listed, read_config

CLASS_NAME = "AutoencoderKLLTXVideo"
PLAIN, LATER = "LTXVideoDownBlock3D", "LTXVideo095DownBlock3D"
STRIDES: Mapping[str, tuple[int, int]] = {
    "conv": (2, 2),
    "spatial": (1, 2),
    "temporal": (2, 1),
    "spatiotemporal": (2, 2),
}
"""By kind of a level's end, how many frames, and pixels a side, become one."""


@dataclass(frozen=True, kw_only=True)
class LTXVAEConfig:
    """diffusers' entries by diffusers' names and with its defaults, those of 0.9.0.

    Lists have an entry for each level, those of layers and noise one more for the middle. From 0.9.1 on the decoder is
    told a time (`timestep_conditioning`). The encoder's levels and the compression ratios, where they are given, say
    again what the decoder's levels say: pixels a side, and frames, per latent cell.

    Raises ValueError for entries that contradict each other, or of a kind that is not known.
    """

    in_channels: int = 3
    out_channels: int = 3
    latent_channels: int = 128
    block_out_channels: tuple[int, ...] = (128, 256, 512, 512)
    down_block_types: tuple[str, ...] = (PLAIN,) * 4
    decoder_block_out_channels: tuple[int, ...] = (128, 256, 512, 512)
    layers_per_block: tuple[int, ...] = (4, 3, 3, 3, 4)
    decoder_layers_per_block: tuple[int, ...] = (4, 3, 3, 3, 4)
    spatio_temporal_scaling: tuple[bool, ...] = (True, True, True, False)
    decoder_spatio_temporal_scaling: tuple[bool, ...] = (True, True, True, False)
    decoder_inject_noise: tuple[bool, ...] = (False,) * 5
    downsample_type: tuple[str, ...] = ("conv",) * 4
    upsample_residual: tuple[bool, ...] = (False,) * 4
    upsample_factor: tuple[int, ...] = (1,) * 4
    timestep_conditioning: bool = False
    patch_size: int = 4
    patch_size_t: int = 1
    resnet_norm_eps: float = 1e-6
    scaling_factor: float = 1.0
    encoder_causal: bool = True
    decoder_causal: bool = False
    spatial_compression_ratio: int | None = None
    temporal_compression_ratio: int | None = None

    def __post_init__(self) -> None:
        for name, given, needed in (
            ("in_channels", self.in_channels, 3),
            ("out_channels", self.out_channels, 3),
            ("patch_size_t", self.patch_size_t, 1),
            ("scaling_factor", self.scaling_factor, 1),
        ):
            if given != needed:
                raise ValueError(f"{name} is {given}; only autoencoders where it is {needed} can be used")
        wanted, default = (self.frames_per_cell, self.pixels_per_cell), 2 ** sum(self.spatio_temporal_scaling)
        stated = (
            self.temporal_compression_ratio or default,
            self.spatial_compression_ratio or self.patch_size * default,
        )
        for name, found in (("encoder's levels make", self._encoded()), ("compression ratios make", stated)):
            if found != wanted:
                raise ValueError(
                    f"the {name} one latent cell of {found[0]} frames and {found[1]} pixels a side; the decoder's"
                    f" levels of {wanted[0]} and {wanted[1]}"
                )
        if self.timestep_conditioning and self._changes_width():
            raise ValueError(
                f"decoder_block_out_channels is {list(self.decoder_block_out_channels)}, upsample_factor "
                f"{list(self.upsample_factor)}; a decoder that is told a time changes widths by its factors alone"
            )

    @property
    def is_later(self) -> bool:
        """Whether its encoder is of the kind that began with 0.9.5."""
        return LATER in self.down_block_types

    @property
    def frames_per_cell(self) -> int:
        """Of a latent frame but the first."""
        return 2 ** sum(self.decoder_spatio_temporal_scaling)

    @property
    def pixels_per_cell(self) -> int:
        """A side."""
        return self.patch_size * 2 ** sum(self.decoder_spatio_temporal_scaling)

    def entries(self) -> dict[str, Any]:
        """The arguments of diffusers' class."""
        return listed(self)

    def _encoded(self) -> tuple[int, int]:
        """Frames and pixels a side of a latent cell, by the encoder's levels."""
        frames, pixels = 1, self.patch_size
        for block, scaled, kind in zip(
            self.down_block_types, self.spatio_temporal_scaling, self.downsample_type, strict=False
        ):
            if block not in (PLAIN, LATER) or kind not in STRIDES:
                known = f"{PLAIN} and {LATER} with {', '.join(STRIDES)}"
                raise ValueError(f"a level is {block!r} with downsample_type {kind!r}; known are {known}")
            by = STRIDES["conv" if block == PLAIN else kind] if scaled else (1, 1)
            frames, pixels = frames * by[0], pixels * by[1]
        return frames, pixels

    def _changes_width(self) -> bool:
        """Whether a level of the decoder begins with a layer that changes the width."""
        width = self.decoder_block_out_channels[-1]
        for out, factor in zip(self.decoder_block_out_channels[::-1], self.upsample_factor[::-1], strict=False):
            if width // factor != out // factor:
                return True
            width = out // factor
        return False


def read_ltx_vae_config(folder: Path) -> LTXVAEConfig:
    """The config of a folder in diffusers' layout.

    Raises:
        FileNotFoundError: it has no config.json. ValueError: that is not the config of an `AutoencoderKLLTXVideo`, or
        has an entry that is not known or of another type.
    """
    return read_config(folder, "an autoencoder", ltx_vae_config)


def ltx_vae_config(entries: Mapping[str, object]) -> LTXVAEConfig:
    """The config that the entries of a config.json say. Raises ValueError as `read_ltx_vae_config` does."""
    ratios = ("spatial_compression_ratio", "temporal_compression_ratio")
    return LTXVAEConfig(**known_entries(entries, CLASS_NAME, _KINDS, may_be_null=ratios))


def _is_words(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in cast(list[object], value))


_WORDS: Kind = ("a list of words", _is_words)
_KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(("in_channels", "out_channels", "latent_channels", "patch_size", "patch_size_t"), SIZE),
    **dict.fromkeys(("spatial_compression_ratio", "temporal_compression_ratio"), SIZE),
    **dict.fromkeys(("block_out_channels", "decoder_block_out_channels", "upsample_factor"), SIZES),
    **dict.fromkeys(("layers_per_block", "decoder_layers_per_block"), SIZES),
    **dict.fromkeys(("down_block_types", "downsample_type"), _WORDS),
    **dict.fromkeys(("spatio_temporal_scaling", "decoder_spatio_temporal_scaling"), FLAGS),
    **dict.fromkeys(("decoder_inject_noise", "upsample_residual"), FLAGS),
    **dict.fromkeys(("timestep_conditioning", "encoder_causal", "decoder_causal"), FLAG),
    **dict.fromkeys(("resnet_norm_eps", "scaling_factor"), POSITIVE),
}
