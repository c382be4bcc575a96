"""The layouts that Wan's checkpoints come in."""

from collections.abc import Mapping

from ..core.key_map import KeyMap, Layout, Reshape, Rule

_DIFFUSERS = {
    "text_in.up.{leaf}": "condition_embedder.text_embedder.linear_1.{leaf}",
    "text_in.down.{leaf}": "condition_embedder.text_embedder.linear_2.{leaf}",
    "time_embed.inner.{leaf}": "condition_embedder.time_embedder.linear_1.{leaf}",
    "time_embed.outer.{leaf}": "condition_embedder.time_embedder.linear_2.{leaf}",
    "time_projection.{leaf}": "condition_embedder.time_proj.{leaf}",
    "picture_in.positions": "condition_embedder.image_embedder.pos_embed",
    "picture_in.norm.{leaf}": "condition_embedder.image_embedder.norm1.{leaf}",
    "picture_in.mlp.up.{leaf}": "condition_embedder.image_embedder.ff.net.0.proj.{leaf}",
    "picture_in.mlp.down.{leaf}": "condition_embedder.image_embedder.ff.net.2.{leaf}",
    "picture_in.final_norm.{leaf}": "condition_embedder.image_embedder.norm2.{leaf}",
    "modulation.{i}": "blocks.{i}.scale_shift_table",
    "blocks.{i}.cross_norm.{leaf}": "blocks.{i}.norm2.{leaf}",
    "blocks.{i}.mlp.up.{leaf}": "blocks.{i}.ffn.net.0.proj.{leaf}",
    "blocks.{i}.mlp.down.{leaf}": "blocks.{i}.ffn.net.2.{leaf}",
    "final_modulation": "scale_shift_table",
    "output.{leaf}": "proj_out.{leaf}",
}
_ORIGINAL = {
    "text_in.up.{leaf}": "text_embedding.0.{leaf}",
    "text_in.down.{leaf}": "text_embedding.2.{leaf}",
    "time_embed.inner.{leaf}": "time_embedding.0.{leaf}",
    "time_embed.outer.{leaf}": "time_embedding.2.{leaf}",
    "time_projection.{leaf}": "time_projection.1.{leaf}",
    "picture_in.positions": "img_emb.emb_pos",
    "picture_in.norm.{leaf}": "img_emb.proj.0.{leaf}",
    "picture_in.mlp.up.{leaf}": "img_emb.proj.1.{leaf}",
    "picture_in.mlp.down.{leaf}": "img_emb.proj.3.{leaf}",
    "picture_in.final_norm.{leaf}": "img_emb.proj.4.{leaf}",
    "modulation.{i}": "blocks.{i}.modulation",
    "blocks.{i}.cross_norm.{leaf}": "blocks.{i}.norm3.{leaf}",
    "blocks.{i}.mlp.up.{leaf}": "blocks.{i}.ffn.0.{leaf}",
    "blocks.{i}.mlp.down.{leaf}": "blocks.{i}.ffn.2.{leaf}",
    "final_modulation": "head.modulation",
    "output.{leaf}": "head.head.{leaf}",
}


def wan_key_map() -> KeyMap:
    """diffusers' layout, and Wan-AI's own, as ComfyUI saves it too."""
    added = ("add_k_proj", "add_v_proj", "norm_added_k")
    diffusers = _attention(("attn1", "attn2"), ("to_q", "to_k", "to_v"), "to_out.0", added)
    original = _attention(("self_attn", "cross_attn"), ("q", "k", "v"), "o", ("k_img", "v_img", "norm_k_img"))
    unused = ("blocks.{i}.attn2.norm_added_q.weight",)
    return KeyMap(
        (
            Layout("diffusers", _rules(_DIFFUSERS, diffusers), drops=unused),
            Layout("original", _rules(_ORIGINAL, original), prefixes=("", "model.diffusion_model.")),
        )
    )


def _rules(names: Mapping[str, str], attention: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """A layout's rules; `names` are its own by ours."""
    patch = (
        Rule("patch_embedding.weight", "image_in.weight", (Reshape((0, -1)),)),
        Rule("patch_embedding.bias", "image_in.bias"),
    )
    return (*patch, *(Rule(theirs, ours) for ours, theirs in names.items()), *attention)


def _attention(
    modules: tuple[str, str], qkv: tuple[str, str, str], output: str, added: tuple[str, str, str]
) -> tuple[Rule, ...]:
    """The rules of both attentions, by a layout's names of the two, of their layers, and of those for pictures (keys,
    values, the norm of keys)."""
    own, cross = (f"blocks.{{i}}.{module}." for module in modules)
    mine, theirs = "blocks.{i}.attention.", "blocks.{i}.cross."
    return (
        Rule(tuple(f"{own}{name}.{{leaf}}" for name in qkv), f"{mine}qkv.{{leaf}}"),
        Rule(f"{own}norm_q.weight", f"{mine}query_norm.weight"),
        Rule(f"{own}norm_k.weight", f"{mine}key_norm.weight"),
        Rule(f"{own}{output}.{{leaf}}", f"{mine}output.{{leaf}}"),
        Rule(f"{cross}{qkv[0]}.{{leaf}}", f"{theirs}query.{{leaf}}"),
        Rule(f"{cross}norm_q.weight", f"{theirs}query_norm.weight"),
        Rule(f"{cross}{output}.{{leaf}}", f"{theirs}output.{{leaf}}"),
        Rule(tuple(f"{cross}{name}.{{leaf}}" for name in qkv[1:]), "text_keys_values.{i}.{leaf}"),
        Rule(f"{cross}norm_k.weight", "text_key_norms.{i}.weight"),
        Rule(tuple(f"{cross}{name}.{{leaf}}" for name in added[:2]), "picture_keys_values.{i}.{leaf}"),
        Rule(f"{cross}{added[2]}.weight", "picture_key_norms.{i}.weight"),
    )
