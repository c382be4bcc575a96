"""The layouts that Z-Image's checkpoints come in."""

from ..core.key_map import KeyMap, Layout, Rule

_STACKS = {"noise_refiner": "image_blocks", "context_refiner": "text_blocks", "layers": "blocks"}
_MODULATIONS = {"noise_refiner": "image_modulation", "layers": "modulation"}


def z_image_key_map() -> KeyMap:
    """diffusers' layout, and the single files of Tongyi-MAI's and ComfyUI's, which have fused attention."""
    diffusers = _rules("all_x_embedder.2-1", "all_final_layer.2-1", ("to_q", "to_k", "to_v"), "to_out.0", "norm_{}")
    original = _rules("x_embedder", "final_layer", ("qkv",), "out", "{}_norm")
    unused = ("norm_final.weight",)
    return KeyMap(
        (
            Layout("diffusers", diffusers),
            Layout("original", original, drops=unused, prefixes=("", "model.diffusion_model.")),
        )
    )


def _rules(image_in: str, final: str, qkv: tuple[str, ...], output: str, norm: str) -> tuple[Rule, ...]:
    """A layout's rules, by what differs between the two; `norm` has a place for q or k."""
    blocks = [rule for stacks in _STACKS.items() for rule in _block(*stacks, qkv, output, norm)]
    modulations = [
        Rule(f"{theirs}.{{i}}.adaLN_modulation.0.{{leaf}}", f"{ours}.{{i}}.{{leaf}}")
        for theirs, ours in _MODULATIONS.items()
    ]
    return (
        Rule(f"{image_in}.{{leaf}}", "image_in.{leaf}"),
        Rule("x_pad_token", "image_padding"),
        Rule("cap_embedder.0.weight", "text_norm.weight"),
        Rule("cap_embedder.1.{leaf}", "text_in.{leaf}"),
        Rule("cap_pad_token", "text_padding"),
        Rule("t_embedder.mlp.0.{leaf}", "time_embed.inner.{leaf}"),
        Rule("t_embedder.mlp.2.{leaf}", "time_embed.outer.{leaf}"),
        *blocks,
        *modulations,
        Rule(f"{final}.adaLN_modulation.1.{{leaf}}", "final_modulation.{leaf}"),
        Rule(f"{final}.linear.{{leaf}}", "output.{leaf}"),
    )


def _block(theirs: str, ours: str, qkv: tuple[str, ...], output: str, norm: str) -> list[Rule]:
    source, target = f"{theirs}.{{i}}.", f"{ours}.{{i}}."
    return [
        Rule(tuple(f"{source}attention.{name}.weight" for name in qkv), f"{target}attention.qkv.weight"),
        Rule(f"{source}attention.{output}.weight", f"{target}attention.output.weight"),
        Rule(f"{source}attention.{norm.format('q')}.weight", f"{target}attention.query_norm.weight"),
        Rule(f"{source}attention.{norm.format('k')}.weight", f"{target}attention.key_norm.weight"),
        Rule((f"{source}feed_forward.w1.weight", f"{source}feed_forward.w3.weight"), f"{target}mlp.gate_up.weight"),
        Rule(f"{source}feed_forward.w2.weight", f"{target}mlp.down.weight"),
        Rule(f"{source}attention_norm1.weight", f"{target}attention_norm.weight"),
        Rule(f"{source}attention_norm2.weight", f"{target}attention_post_norm.weight"),
        Rule(f"{source}ffn_norm1.weight", f"{target}mlp_norm.weight"),
        Rule(f"{source}ffn_norm2.weight", f"{target}mlp_post_norm.weight"),
    ]
