"""The sizes of an `AutoencoderKLHunyuanVideo15`, and reading them from diffusers' config.json or a file's tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.diffusers_config import FLAG, POSITIVE, SIZE, SIZES, Kind, known_entries, listed, read_config
from ..core.shapes import Shapes

CLASS_NAME = "AutoencoderKLHunyuanVideo15"


@dataclass(frozen=True, kw_only=True)
class HunyuanVideoVAEConfig:
    """diffusers' entries by diffusers' names and with its defaults, the published ones. Latents are the posterior's
    times `scaling_factor`; the ratios are pixels a side, and frames, per latent cell.

    Raises ValueError for entries that contradict each other.
    """

    in_channels: int = 3
    out_channels: int = 3
    latent_channels: int = 32
    block_out_channels: tuple[int, ...] = (128, 256, 512, 1024, 1024)
    layers_per_block: int = 2
    spatial_compression_ratio: int = 16
    temporal_compression_ratio: int = 4
    downsample_match_channel: bool = True
    upsample_match_channel: bool = True
    scaling_factor: float = 1.03682

    def __post_init__(self) -> None:
        for name, channels in (("in_channels", self.in_channels), ("out_channels", self.out_channels)):
            if channels != 3:
                raise ValueError(f"{name} is {channels}; clips have 3")
        spatial, temporal = self.spatial_compression_ratio, self.temporal_compression_ratio
        if spatial & (spatial - 1) or temporal & (temporal - 1) or temporal > spatial:
            raise ValueError(
                f"spatial_compression_ratio is {spatial} and temporal_compression_ratio {temporal}; they must be "
                "powers of 2, the second no larger than the first"
            )

    def entries(self) -> dict[str, Any]:
        """The arguments of diffusers' class."""
        return listed(self)


def read_hunyuan_video_vae_config(folder: Path) -> HunyuanVideoVAEConfig:
    """The config of a folder in diffusers' layout.

    Raises:
        FileNotFoundError: it has no config.json. ValueError: that is not the config of such an autoencoder, or has an
        entry that is not known or of another type.
    """
    return read_config(folder, "an autoencoder", hunyuan_video_vae_config)


def hunyuan_video_vae_config(entries: Mapping[str, object]) -> HunyuanVideoVAEConfig:
    """The config that the entries of a config.json say. Raises ValueError as `read_hunyuan_video_vae_config` does."""
    return HunyuanVideoVAEConfig(**known_entries(entries, CLASS_NAME, _KINDS))


def sized_hunyuan_video_vae_config(shapes: Shapes) -> HunyuanVideoVAEConfig:
    """The published config with the sizes that shapes in Tencent's layout or diffusers' show.

    Raises:
        ValueError: they are not those of such an autoencoder, or make no sense.
    """
    stem, resnets, halver = "encoder.down_blocks.", "resnets", "downsamplers.0"
    if shapes.has("encoder.down.0.block.0.conv1.conv.weight"):
        stem, resnets, halver = "encoder.down.", "block", "downsample"
    num_levels = shapes.count(stem)
    outputs = [shapes.of(f"{stem}{i}.{resnets}.0.conv1.conv.weight", axes=5)[0] for i in range(num_levels)]
    halvings = [name for i in range(num_levels) if shapes.has(name := f"{stem}{i}.{halver}.conv.conv.weight")]
    packed = [shapes.of(name, axes=5)[0] for name in halvings]  # by 4 where frames stay, else by 8
    channels = (*outputs[1:], outputs[-1])
    in_time = [8 * each == width for each, width in zip(packed, channels, strict=False)]
    return HunyuanVideoVAEConfig(
        latent_channels=shapes.of("decoder.conv_in.conv.weight", axes=5)[1],
        block_out_channels=tuple(outputs),
        layers_per_block=shapes.count(f"{stem}0.{resnets}."),
        spatial_compression_ratio=2 ** len(halvings),
        temporal_compression_ratio=2 ** sum(in_time),
    )


_KINDS: Mapping[str, Kind] = {
    "in_channels": SIZE,
    "out_channels": SIZE,
    "latent_channels": SIZE,
    "block_out_channels": SIZES,
    "layers_per_block": SIZE,
    "spatial_compression_ratio": SIZE,
    "temporal_compression_ratio": SIZE,
    "downsample_match_channel": FLAG,
    "upsample_match_channel": FLAG,
    "scaling_factor": POSITIVE,
}
