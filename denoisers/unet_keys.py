"""The names of a UNet's weights: diffusers', and the original ones (CompVis LDM, Stability), which count all blocks of
a side in one row."""

from collections.abc import Iterator

from torch import nn

from ..core.key_map import KeyMap, Layout, Rule, named_weights
from .unet_config import UNetConfig

PREFIXES = ("", "model.diffusion_model.")
_RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
_OUTSIDE = {
    "input_blocks.0.0": "conv_in",
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "label_emb.0.0": "add_embedding.linear_1",
    "label_emb.0.2": "add_embedding.linear_2",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
}


def unet_key_map(unet: nn.Module, config: UNetConfig) -> KeyMap:
    """The map of both layouts; targets are the names of diffusers' module `unet`."""
    same = tuple(Rule(name, name) for name in named_weights(unet))
    return KeyMap(
        (
            Layout("diffusers", same),
            Layout("original", tuple(_original(config)), prefixes=PREFIXES),
        )
    )


def _original(config: UNetConfig) -> Iterator[Rule]:
    for old, new in _OUTSIDE.items():
        yield Rule(f"{old}.{{leaf}}", f"{new}.{{leaf}}")
    yield from _resnet("middle_block.0", "mid_block.resnets.0")
    yield from _transformer("middle_block.1", "mid_block.attentions.0")
    yield from _resnet("middle_block.2", "mid_block.resnets.1")
    levels = len(config.block_out_channels)
    layers = config.layers_per_block if isinstance(config.layers_per_block, int) else config.layers_per_block[0]
    for level in range(levels):
        for layer in range(layers):
            yield from _down(1 + level * (layers + 1) + layer, level, layer)
        last = f"input_blocks.{(level + 1) * (layers + 1)}"
        yield Rule(f"{last}.0.op.{{leaf}}", f"down_blocks.{level}.downsamplers.0.conv.{{leaf}}")
        for layer in range(layers + 1):
            yield from _up(level * (layers + 1) + layer, level, layer)
        last = f"output_blocks.{level * (layers + 1) + layers}"
        place = 2 if config.up_block_types[level].startswith("CrossAttn") else 1
        yield Rule(f"{last}.{place}.conv.{{leaf}}", f"up_blocks.{level}.upsamplers.0.conv.{{leaf}}")


def _down(number: int, level: int, layer: int) -> Iterator[Rule]:
    yield from _resnet(f"input_blocks.{number}.0", f"down_blocks.{level}.resnets.{layer}")
    yield from _transformer(f"input_blocks.{number}.1", f"down_blocks.{level}.attentions.{layer}")


def _up(number: int, level: int, layer: int) -> Iterator[Rule]:
    yield from _resnet(f"output_blocks.{number}.0", f"up_blocks.{level}.resnets.{layer}")
    yield from _transformer(f"output_blocks.{number}.1", f"up_blocks.{level}.attentions.{layer}")


def _resnet(old: str, new: str) -> Iterator[Rule]:
    for name, other in _RESNET.items():
        yield Rule(f"{old}.{name}.{{leaf}}", f"{new}.{other}.{{leaf}}")


def _transformer(old: str, new: str) -> Iterator[Rule]:
    for part in ("norm", "proj_in", "proj_out"):
        yield Rule(f"{old}.{part}.{{leaf}}", f"{new}.{part}.{{leaf}}")
    yield Rule(f"{old}.transformer_blocks.{{any*}}", f"{new}.transformer_blocks.{{any*}}")
