"""The layouts that HunyuanVideo 1.5's checkpoints come in."""

from collections.abc import Mapping, Sequence

from ..core.key_map import KeyMap, Layout, Reshape, Rule
from .keys import final_layer, joint_stream

_DIFFUSERS = {
    "time_embed.inner.{leaf}": "time_embed.timestep_embedder.linear_1.{leaf}",
    "time_embed.outer.{leaf}": "time_embed.timestep_embedder.linear_2.{leaf}",
    "next_time_embed.inner.{leaf}": "time_embed.timestep_embedder_r.linear_1.{leaf}",
    "next_time_embed.outer.{leaf}": "time_embed.timestep_embedder_r.linear_2.{leaf}",
    "refiner_time.inner.{leaf}": "context_embedder.time_text_embed.timestep_embedder.linear_1.{leaf}",
    "refiner_time.outer.{leaf}": "context_embedder.time_text_embed.timestep_embedder.linear_2.{leaf}",
    "refiner_text.inner.{leaf}": "context_embedder.time_text_embed.text_embedder.linear_1.{leaf}",
    "refiner_text.outer.{leaf}": "context_embedder.time_text_embed.text_embedder.linear_2.{leaf}",
    "text_in.{leaf}": "context_embedder.proj_in.{leaf}",
    "glyph_in.norm.{leaf}": "context_embedder_2.norm.{leaf}",
    "glyph_in.first.{leaf}": "context_embedder_2.linear_1.{leaf}",
    "glyph_in.second.{leaf}": "context_embedder_2.linear_2.{leaf}",
    "glyph_in.third.{leaf}": "context_embedder_2.linear_3.{leaf}",
    "picture_in.norm.{leaf}": "image_embedder.norm_in.{leaf}",
    "picture_in.mlp.up.{leaf}": "image_embedder.linear_1.{leaf}",
    "picture_in.mlp.down.{leaf}": "image_embedder.linear_2.{leaf}",
    "picture_in.final_norm.{leaf}": "image_embedder.norm_out.{leaf}",
    "kinds": "cond_type_embed.weight",
}
_ORIGINAL = {
    "time_embed.inner.{leaf}": "time_in.mlp.0.{leaf}",
    "time_embed.outer.{leaf}": "time_in.mlp.2.{leaf}",
    "next_time_embed.inner.{leaf}": "time_r_in.mlp.0.{leaf}",
    "next_time_embed.outer.{leaf}": "time_r_in.mlp.2.{leaf}",
    "refiner_time.inner.{leaf}": "txt_in.t_embedder.mlp.0.{leaf}",
    "refiner_time.outer.{leaf}": "txt_in.t_embedder.mlp.2.{leaf}",
    "refiner_text.inner.{leaf}": "txt_in.c_embedder.linear_1.{leaf}",
    "refiner_text.outer.{leaf}": "txt_in.c_embedder.linear_2.{leaf}",
    "text_in.{leaf}": "txt_in.input_embedder.{leaf}",
    "glyph_in.norm.{leaf}": "byt5_in.layernorm.{leaf}",
    "glyph_in.first.{leaf}": "byt5_in.fc1.{leaf}",
    "glyph_in.second.{leaf}": "byt5_in.fc2.{leaf}",
    "glyph_in.third.{leaf}": "byt5_in.fc3.{leaf}",
    "picture_in.norm.{leaf}": "vision_in.proj.0.{leaf}",
    "picture_in.mlp.up.{leaf}": "vision_in.proj.1.{leaf}",
    "picture_in.mlp.down.{leaf}": "vision_in.proj.3.{leaf}",
    "picture_in.final_norm.{leaf}": "vision_in.proj.4.{leaf}",
    "kinds": "cond_type_embedding.weight",
    "final_modulation.{leaf}": "final_layer.adaLN_modulation.1.{leaf}",
    "output.{leaf}": "final_layer.linear.{leaf}",
}


def hunyuan_video_key_map() -> KeyMap:
    """diffusers' layout, Tencent's own, and ComfyUI's, which is that with one matrix for queries, keys and values."""
    block = "transformer_blocks.{i}."
    diffusers = (
        *_around("x_embedder", _DIFFUSERS),
        *_refiner(
            "context_embedder.token_refiner.refiner_blocks.{i}.",
            tuple(f"attn.to_{n}" for n in "qkv"),
            {"attn.to_out.0": "output", "ff.net.0.proj": "up", "ff.net.2": "down"},
            "norm_out.linear",
        ),
        Rule((f"{block}norm1.linear.{{leaf}}", f"{block}norm1_context.linear.{{leaf}}"), "modulation.{i}.{leaf}"),
        *joint_stream("x", "to_{}", "norm_{}", "to_out.0", "ff"),
        *joint_stream("context", "add_{}_proj", "norm_added_{}", "to_add_out", "ff_context"),
        *final_layer(),
    )
    prefixes, kinds = ("", "model.diffusion_model."), {"original": tuple("qkv"), "ComfyUI": ("qkv",)}
    others = (Layout(name, _original(parts), prefixes=prefixes) for name, parts in kinds.items())
    return KeyMap((Layout("diffusers", diffusers), *others))


def _original(parts: Sequence[str]) -> tuple[Rule, ...]:
    """Tencent's names, by those of the matrices for queries, keys and values."""
    block = "double_blocks.{i}."
    return (
        *_around("img_in", _ORIGINAL),
        *_refiner(
            "txt_in.individual_token_refiner.blocks.{i}.",
            ("self_attn_qkv",),
            {"self_attn_proj": "output", "mlp.fc1": "up", "mlp.fc2": "down"},
            "adaLN_modulation.1",
        ),
        Rule((f"{block}img_mod.linear.{{leaf}}", f"{block}txt_mod.linear.{{leaf}}"), "modulation.{i}.{leaf}"),
        *_original_stream("x", "img", parts),
        *_original_stream("context", "txt", parts),
    )


def _around(patch: str, names: Mapping[str, str]) -> list[Rule]:
    """What is around the blocks; `names` are a layout's own by ours."""
    return [
        Rule(f"{patch}.proj.weight", "image_in.weight", (Reshape((0, -1)),)),
        Rule(f"{patch}.proj.bias", "image_in.bias"),
        *(Rule(theirs, ours) for ours, theirs in names.items()),
    ]


def _refiner(block: str, qkv: Sequence[str], layers: Mapping[str, str], gates: str) -> list[Rule]:
    """The blocks of the text's refiner, by a layout's names of what they hold."""
    return [
        Rule(tuple(f"{block}{name}.{{leaf}}" for name in qkv), "refiner.{i}.qkv.{leaf}"),
        *(Rule(f"{block}{theirs}.{{leaf}}", f"refiner.{{i}}.{ours}.{{leaf}}") for theirs, ours in layers.items()),
        Rule(f"{block}norm1.{{leaf}}", "refiner.{i}.norm.{leaf}"),
        Rule(f"{block}norm2.{{leaf}}", "refiner.{i}.mlp_norm.{leaf}"),
        Rule(f"{block}{gates}.{{leaf}}", "refiner_gates.{i}.{leaf}"),
    ]


def _original_stream(ours: str, theirs: str, parts: Sequence[str]) -> list[Rule]:
    """One stream of the joint blocks."""
    block, target = f"double_blocks.{{i}}.{theirs}_", f"blocks.{{i}}.{ours}."
    return [
        Rule(tuple(f"{block}attn_{name}.{{leaf}}" for name in parts), f"{target}qkv.{{leaf}}"),
        Rule(f"{block}attn_q_norm.weight", f"{target}query_norm.weight"),
        Rule(f"{block}attn_k_norm.weight", f"{target}key_norm.weight"),
        Rule(f"{block}attn_proj.{{leaf}}", f"{target}output.{{leaf}}"),
        Rule(f"{block}mlp.fc1.{{leaf}}", f"{target}mlp.up.{{leaf}}"),
        Rule(f"{block}mlp.fc2.{{leaf}}", f"{target}mlp.down.{{leaf}}"),
    ]
