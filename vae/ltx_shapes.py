"""The sizes of LTX-Video's autoencoders, from the tensors of a file in Lightricks' layout.

A half is one list of parts there: stacks of resnets, and between them layers that change their width, or how many cells
there are. What shapes do not show is as published.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..core.shapes import Shapes
from .ltx_config import LATER, PLAIN, LTXVAEConfig

Kind = Literal["resnets", "conv", "spread", "width"]
_RESNETS, _SPREAD = "res_blocks.0.conv1.conv.weight", "conv.conv.weight"
_TELLS: tuple[tuple[str, Kind], ...] = (
    (_RESNETS, "resnets"),
    (_SPREAD, "spread"),
    ("conv.weight", "conv"),
    ("conv1.conv.weight", "width"),
)
"""A tensor of each kind of part."""
_DOWNSAMPLING = {2: "temporal", 4: "spatial", 8: "spatiotemporal"}
"""By how many cells become one."""
_DOUBLED = 8  # cells, of one, where frames and sides are doubled


@dataclass(frozen=True, kw_only=True)
class _Level:
    """A stack of resnets, `width` wide. `beside`: the kind of layer that makes other cells, after the stack in the
    encoder and before it in the decoder, and the channels that go into that and come out."""

    layers: int
    width: int
    noise: bool
    beside: tuple[Kind, int, int] | None = None

    @property
    def factor(self) -> int:
        """What upsampling leaves out of the width."""
        return 1 if self.beside is None else _DOUBLED * self.beside[1] // self.beside[2]


def sized_ltx_vae_config(shapes: Shapes) -> LTXVAEConfig:
    """The config that the shapes show.

    Raises:
        ValueError: they are not those of such an autoencoder, or make no sense.
    """
    encoder, (middle, *others) = list(_encoder(shapes)), list(_decoder(shapes))
    levels, up, sides = encoder[:-1], others[::-1], sum(level.beside is not None for level in others)
    later = any(level.beside is not None and level.beside[0] == "spread" for level in levels)
    patch = math.isqrt(shapes.of("encoder.conv_in.conv.weight", axes=5)[1] // 3)
    return LTXVAEConfig(
        latent_channels=shapes.of("decoder.conv_in.conv.weight", axes=5)[1],
        block_out_channels=tuple(level.width for level in (encoder if later else levels)),
        down_block_types=(LATER if later else PLAIN,) * len(levels),
        decoder_block_out_channels=tuple(level.width * level.factor for level in up),
        layers_per_block=tuple(level.layers for level in encoder),
        decoder_layers_per_block=tuple(level.layers for level in (*up, middle)),
        spatio_temporal_scaling=tuple(level.beside is not None for level in levels),
        decoder_spatio_temporal_scaling=tuple(level.beside is not None for level in up),
        decoder_inject_noise=tuple(level.noise for level in (*up, middle)),
        downsample_type=tuple(_downsampling(*each) for each in zip(levels, encoder[1:], strict=True)),
        upsample_residual=tuple(level.factor > 1 for level in up),
        upsample_factor=tuple(level.factor for level in up),
        timestep_conditioning=shapes.has("decoder.last_scale_shift_table"),
        patch_size=patch,
        spatial_compression_ratio=patch * 2**sides if later else None,
        temporal_compression_ratio=2**sides if later else None,
    )


def _encoder(shapes: Shapes) -> Iterator[_Level]:
    """Its levels, then the middle."""
    level: _Level | None = None
    for kind, stem in _parts(shapes, "encoder.down_blocks."):
        if kind == "resnets":
            if level is not None:
                yield level
            level = _stack(shapes, stem)
        elif kind != "width" and level is not None:
            level = dataclasses.replace(level, beside=_beside(shapes, kind, stem))
    if level is not None:
        yield level


def _decoder(shapes: Shapes) -> Iterator[_Level]:
    """The middle, then its levels."""
    beside: tuple[Kind, int, int] | None = None
    for kind, stem in _parts(shapes, "decoder.up_blocks."):
        if kind == "resnets":
            yield dataclasses.replace(_stack(shapes, stem), beside=beside)
            beside = None
        elif kind != "width":
            beside = _beside(shapes, kind, stem)


def _parts(shapes: Shapes, stem: str) -> Iterator[tuple[Kind, str]]:
    """The kind of each part of a half, and what its names begin with."""
    count = shapes.count(stem)
    if not count:
        raise ValueError(f"the checkpoint holds no {stem}0")
    for n in range(count):
        kind: Kind | None = next((each for name, each in _TELLS if shapes.has(f"{stem}{n}.{name}")), None)
        if kind is None:
            raise ValueError(f"{stem}{n} is no part of an autoencoder of LTX-Video")
        yield kind, f"{stem}{n}."


def _stack(shapes: Shapes, stem: str) -> _Level:
    return _Level(
        layers=shapes.count(f"{stem}res_blocks."),
        width=shapes.of(f"{stem}{_RESNETS}", axes=5)[0],
        noise=shapes.has(f"{stem}res_blocks.0.per_channel_scale1"),
    )


def _beside(shapes: Shapes, kind: Kind, stem: str) -> tuple[Kind, int, int]:
    out, width, *_ = shapes.of(f"{stem}{_SPREAD if kind == 'spread' else 'conv.weight'}", axes=5)
    return kind, width, out


def _downsampling(level: _Level, following: _Level) -> str:
    """The name of what is between two levels of the encoder."""
    if level.beside is None or level.beside[0] == "conv":
        return "conv"
    each = following.width // level.beside[2]
    if each not in _DOWNSAMPLING:
        raise ValueError(f"downsampling makes {following.width} channels of {level.beside[2]}: of {each} cells one")
    return _DOWNSAMPLING[each]
