"""Rules for names that several families' checkpoints share."""

from collections.abc import Sequence

from ..core.key_map import Part, Rule, Share

GELU_LAYERS = (("net.0.proj", "up"), ("net.2", "down"))
"""An MLP's layers by diffusers' names and ours."""
SWIGLU_LAYERS = (("linear_in", "gate_up"), ("linear_out", "down"))


def joint_stream(
    ours: str,
    projection: str,
    norm: str,
    output: str,
    mlp: str,
    layers: Sequence[tuple[str, str]] = GELU_LAYERS,
) -> list[Rule]:
    """One stream of the joint blocks in diffusers' layout: `projection` and `norm` are its names with a place for q, k
    or v, `layers` those of the MLP."""
    block, target = "transformer_blocks.{i}.", f"blocks.{{i}}.{ours}."
    return [
        Rule(tuple(f"{block}attn.{projection.format(n)}.{{leaf}}" for n in "qkv"), f"{target}qkv.{{leaf}}"),
        Rule(f"{block}attn.{norm.format('q')}.weight", f"{target}query_norm.weight"),
        Rule(f"{block}attn.{norm.format('k')}.weight", f"{target}key_norm.weight"),
        Rule(f"{block}attn.{output}.{{leaf}}", f"{target}output.{{leaf}}"),
        *(Rule(f"{block}{mlp}.{theirs}.{{leaf}}", f"{target}mlp.{layer}.{{leaf}}") for theirs, layer in layers),
    ]


def final_layer() -> list[Rule]:
    """diffusers' output layer; its modulation holds scale before shift."""
    scale_first = (Part("norm_out.linear.{leaf}", (Share(1, 2),)), Part("norm_out.linear.{leaf}", (Share(0, 2),)))
    return [Rule(scale_first, "final_modulation.{leaf}"), Rule("proj_out.{leaf}", "output.{leaf}")]
