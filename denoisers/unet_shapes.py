"""What the names and shapes of a UNet's tensors say of it: single files have no config.

Source: the configs of Stable Diffusion 1.5, 2.1, XL and XL's refiner, as published by Stability AI.
"""

import dataclasses

from .shapes import Marks, Shapes
from .unet_config import SD_1, SDXL, UNetConfig

HEAD_WIDTH = 64  # of all but Stable Diffusion 1, which has 8 heads of any width
_TEXT = "1.transformer_blocks.0.attn2.to_k.weight"
SD_MARKS = Marks(
    (
        ("input_blocks.0.0.weight", "time_embed.0.weight", f"input_blocks.1.{_TEXT}"),
        (
            "conv_in.weight",
            "time_embedding.linear_1.weight",
            "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k.weight",
        ),
    )
)
SDXL_MARKS = Marks(
    (
        ("input_blocks.0.0.weight", "time_embed.0.weight", "label_emb.0.0.weight", f"input_blocks.4.{_TEXT}"),
        (
            "conv_in.weight",
            "add_embedding.linear_1.weight",
            "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k.weight",
        ),
    )
)


def unet_config_of_shapes(shapes: Shapes) -> UNetConfig:
    """The config that they show, in the original layout or diffusers'.

    Raises:
        ValueError: they are not those of such a UNet.
    """
    original = shapes.has("input_blocks.0.0.weight")
    levels, layers = _original_size(shapes) if original else _size(shapes)
    resnets = [_resnet(level, layers, original) for level in range(levels)]
    found = [_transformer(level, layers, original) for level in range(levels)]
    widths = tuple(shapes.of(name, axes=4)[0] for name in resnets)
    depths = [shapes.count(f"{name}.transformer_blocks.") for name in found]
    middle = "middle_block.1" if original else "mid_block.attentions.0"
    linear = len(shapes.shapes.get(f"{middle}.proj_in.weight", ())) == 2
    told = shapes.has("label_emb.0.0.weight", "add_embedding.linear_1.weight")
    numbers = shapes.of("label_emb.0.0.weight", "add_embedding.linear_1.weight")[1] if told else None
    mid_depth = shapes.count(f"{middle}.transformer_blocks.")  # diffusers gives the middle that of the last level
    return dataclasses.replace(
        SDXL if told else SD_1,
        in_channels=shapes.of("input_blocks.0.0.weight", "conv_in.weight", axes=4)[1],
        out_channels=shapes.of("out.2.weight", "conv_out.weight", axes=4)[0],
        block_out_channels=widths,
        layers_per_block=layers,
        down_block_types=tuple("CrossAttnDownBlock2D" if depth else "DownBlock2D" for depth in depths),
        up_block_types=tuple("CrossAttnUpBlock2D" if depth else "UpBlock2D" for depth in reversed(depths)),
        transformer_layers_per_block=(*(depth or mid_depth for depth in depths[:-1]), mid_depth),
        cross_attention_dim=shapes.of(f"{middle}.transformer_blocks.0.attn2.to_k.weight")[1],
        use_linear_projection=linear,
        attention_head_dim=tuple(width // HEAD_WIDTH for width in widths) if linear else SD_1.attention_head_dim,
        projection_class_embeddings_input_dim=numbers,
    )


def is_refiner(shapes: Shapes) -> bool:
    """Whether they are those of Stable Diffusion XL's refiner: its last level, unlike the base's, does not look at the
    text."""
    original = shapes.has("input_blocks.0.0.weight")
    levels, layers = _original_size(shapes) if original else _size(shapes)
    return not shapes.has(f"{_transformer(levels - 1, layers, original)}.proj_in.weight")


def _original_size(shapes: Shapes) -> tuple[int, int]:
    """Levels, and layers of each: between two levels there is a block that halves."""
    blocks = shapes.count("input_blocks.")
    levels = 1 + sum(shapes.has(f"input_blocks.{i}.0.op.weight") for i in range(blocks))
    if blocks % levels:
        raise ValueError(f"{blocks} input_blocks do not make {levels} levels of equal length")
    return levels, blocks // levels - 1


def _size(shapes: Shapes) -> tuple[int, int]:
    return shapes.count("down_blocks."), shapes.count("down_blocks.0.resnets.")


def _resnet(level: int, layers: int, original: bool) -> str:
    """A weight of the level's first layer, of its width."""
    if original:
        return f"input_blocks.{1 + level * (layers + 1)}.0.out_layers.3.weight"
    return f"down_blocks.{level}.resnets.0.conv2.weight"


def _transformer(level: int, layers: int, original: bool) -> str:
    return f"input_blocks.{1 + level * (layers + 1)}.1" if original else f"down_blocks.{level}.attentions.0"
