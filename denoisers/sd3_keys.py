"""The layouts that SD3's checkpoints come in.

Legend: P = 2 cells per token side, D width.
"""

from ..core.key_map import KeyMap, Layout, Part, Reshape, RowPermutation, Rule, Share
from .keys import joint_stream
from .sd3_config import PATCH, SD3Config

SWAPPED = ((Share(1, 2),), (Share(0, 2),))
"""diffusers keeps scale before shift in modulations without a gate."""
CHANNELS_FIRST = RowPermutation((PATCH, PATCH, -1), (2, 0, 1))
"""Outputs are stored cell by cell, each with all channels; our tokens are channel by channel."""


def sd3_key_map(config: SD3Config) -> KeyMap:
    """diffusers' layout, and Stability AI's own, as ComfyUI saves it too."""
    return KeyMap((_diffusers(config), _original(config)))


def _diffusers(config: SD3Config) -> Layout:
    block, last = "transformer_blocks.{i}.", f"transformer_blocks.{config.layers - 1}."
    read = f"{last}norm1_context.linear.{{leaf}}"
    rules = [
        *_inputs(config, "pos_embed.pos_embed", "pos_embed.proj"),
        *_embedders(
            "time_text_embed.timestep_embedder.linear_{}", "time_text_embed.text_embedder.linear_{}", ("1", "2")
        ),
        Rule((f"{block}norm1.linear.{{leaf}}", f"{block}norm1_context.linear.{{leaf}}"), "modulation.{i}.{leaf}"),
        Rule(
            (f"{last}norm1.linear.{{leaf}}", *(Part(read, operations) for operations in SWAPPED)),
            "last_modulation.{leaf}",
        ),
        *joint_stream("x", "to_{}", "norm_{}", "to_out.0", "ff"),
        *joint_stream("context", "add_{}_proj", "norm_added_{}", "to_add_out", "ff_context"),
        Rule(tuple(f"{block}attn2.to_{n}.{{leaf}}" for n in "qkv"), "blocks.{i}.alone.qkv.{leaf}"),
        Rule(f"{block}attn2.norm_q.weight", "blocks.{i}.alone.query_norm.weight"),
        Rule(f"{block}attn2.norm_k.weight", "blocks.{i}.alone.key_norm.weight"),
        Rule(f"{block}attn2.to_out.0.{{leaf}}", "blocks.{i}.alone.output.{leaf}"),
        Rule(tuple(Part("norm_out.linear.{leaf}", each) for each in SWAPPED), "final_modulation.{leaf}"),
        Rule("proj_out.{leaf}", "output.{leaf}", (CHANNELS_FIRST,)),
    ]
    return Layout("diffusers", tuple(rules))


def _original(config: SD3Config) -> Layout:
    block, last, mod = "joint_blocks.{i}.", f"joint_blocks.{config.layers - 1}.", "adaLN_modulation.1.{leaf}"
    rules = [
        *_inputs(config, "pos_embed", "x_embedder.proj"),
        *_embedders("t_embedder.mlp.{}", "y_embedder.mlp.{}", ("0", "2")),
        Rule((f"{block}x_block.{mod}", f"{block}context_block.{mod}"), "modulation.{i}.{leaf}"),
        Rule((f"{last}x_block.{mod}", f"{last}context_block.{mod}"), "last_modulation.{leaf}"),
        *_original_attention("x", "x_block.attn"),
        *_original_attention("context", "context_block.attn"),
        *_original_attention("alone", "x_block.attn2"),
        *_original_mlp("x"),
        *_original_mlp("context"),
        Rule("final_layer.adaLN_modulation.1.{leaf}", "final_modulation.{leaf}"),
        Rule("final_layer.linear.{leaf}", "output.{leaf}", (CHANNELS_FIRST,)),
    ]
    return Layout("original", tuple(rules), prefixes=("", "model.diffusion_model."))


def _inputs(config: SD3Config, positions: str, patch: str) -> list[Rule]:
    return [
        Rule(positions, "positions", (Reshape((config.grid, config.grid, config.width)),)),
        Rule(f"{patch}.weight", "image_in.weight", (Reshape((0, -1)),)),
        Rule(f"{patch}.bias", "image_in.bias"),
        Rule("context_embedder.{leaf}", "text_in.{leaf}"),
    ]


def _embedders(time: str, pooled: str, layers: tuple[str, str]) -> list[Rule]:
    """The rules of both embedders; `time` and `pooled` are their keys with a place for the layer."""
    return [
        Rule(f"{source.format(layer)}.{{leaf}}", f"{target}.{ours}.{{leaf}}")
        for source, target in ((time, "time_embed"), (pooled, "pooled_embed"))
        for layer, ours in zip(layers, ("inner", "outer"), strict=True)
    ]


def _original_attention(ours: str, theirs: str) -> list[Rule]:
    source, target = f"joint_blocks.{{i}}.{theirs}.", f"blocks.{{i}}.{ours}."
    return [
        Rule(f"{source}qkv.{{leaf}}", f"{target}qkv.{{leaf}}"),
        Rule(f"{source}ln_q.weight", f"{target}query_norm.weight"),
        Rule(f"{source}ln_k.weight", f"{target}key_norm.weight"),
        Rule(f"{source}proj.{{leaf}}", f"{target}output.{{leaf}}"),
    ]


def _original_mlp(stream: str) -> list[Rule]:
    source, target = f"joint_blocks.{{i}}.{stream}_block.mlp.", f"blocks.{{i}}.{stream}.mlp."
    return [
        Rule(f"{source}fc1.{{leaf}}", f"{target}up.{{leaf}}"),
        Rule(f"{source}fc2.{{leaf}}", f"{target}down.{{leaf}}"),
    ]
