"""The layouts that LTX-Video's checkpoints come in."""

from collections.abc import Mapping

from ..core.key_map import KeyMap, Layout, Rule

_BLOCK, _TIME = "transformer_blocks.{i}.", "emb.timestep_embedder.linear_"
_COMMON = {
    "text_in.up.{leaf}": "caption_projection.linear_1.{leaf}",
    "text_in.down.{leaf}": "caption_projection.linear_2.{leaf}",
    "modulation.{i}": f"{_BLOCK}scale_shift_table",
    "blocks.{i}.mlp.up.{leaf}": f"{_BLOCK}ff.net.0.proj.{{leaf}}",
    "blocks.{i}.mlp.down.{leaf}": f"{_BLOCK}ff.net.2.{{leaf}}",
    "blocks.{i}.attention.output.{leaf}": f"{_BLOCK}attn1.to_out.0.{{leaf}}",
    "blocks.{i}.cross.query.{leaf}": f"{_BLOCK}attn2.to_q.{{leaf}}",
    "blocks.{i}.cross.output.{leaf}": f"{_BLOCK}attn2.to_out.0.{{leaf}}",
    "final_modulation": "scale_shift_table",
    "output.{leaf}": "proj_out.{leaf}",
}


def ltx_key_map() -> KeyMap:
    """diffusers' layout, and Lightricks' own, as ComfyUI saves it too."""
    original = _rules("patchify_proj", "adaln_single", ("q_norm", "k_norm"))
    return KeyMap(
        (
            Layout("diffusers", _rules("proj_in", "time_embed", ("norm_q", "norm_k"))),
            Layout("original", original, prefixes=("", "model.diffusion_model.")),
        )
    )


def _rules(patch: str, time: str, norms: tuple[str, str]) -> tuple[Rule, ...]:
    """A layout's rules, by its names of what comes first, of the time embedding, and of norms of queries and keys."""
    query_norm, key_norm = norms
    names: Mapping[str, str] = {
        **_COMMON,
        "image_in.{leaf}": f"{patch}.{{leaf}}",
        "time_embed.inner.{leaf}": f"{time}.{_TIME}1.{{leaf}}",
        "time_embed.outer.{leaf}": f"{time}.{_TIME}2.{{leaf}}",
        "time_projection.{leaf}": f"{time}.linear.{{leaf}}",
        "blocks.{i}.attention.query_norm.weight": f"{_BLOCK}attn1.{query_norm}.weight",
        "blocks.{i}.attention.key_norm.weight": f"{_BLOCK}attn1.{key_norm}.weight",
        "blocks.{i}.cross.query_norm.weight": f"{_BLOCK}attn2.{query_norm}.weight",
        "text_key_norms.{i}.weight": f"{_BLOCK}attn2.{key_norm}.weight",
    }
    qkv = tuple(f"{_BLOCK}attn1.to_{kind}.{{leaf}}" for kind in "qkv")
    crossed = tuple(f"{_BLOCK}attn2.to_{kind}.{{leaf}}" for kind in "kv")
    return (
        *(Rule(theirs, ours) for ours, theirs in names.items()),
        Rule(qkv, "blocks.{i}.attention.qkv.{leaf}"),
        Rule(crossed, "text_keys_values.{i}.{leaf}"),
    )
