"""The names that OpenCLIP gives the weights of CLIP's text encoder, as checkpoints of Stable Diffusion 2 and XL have
them."""

from ..core.key_map import Layout, Part, Reshape, RowPermutation, Rule, Share

_BLOCKS = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_UNUSED = ("logit_scale", "attn_mask")  # for the comparison with pictures; a constant


def open_clip_layout(stem: str, *, blocks: int, projected: int | None) -> Layout:
    """The layout, for `blocks` blocks of transformers' text model, whose names begin with `stem`.

    With a projection, whose pooled vectors are `projected` wide, these are all; without one, a last block and the
    projection are left out, as Stable Diffusion 2 reads it. Queries, keys and values are one tensor there, and the
    projection is stored the other way round.
    """
    theirs, ours = "transformer.resblocks.{i}", f"{stem}encoder.layers.{{i}}"
    rules = [
        Rule("token_embedding.weight", f"{stem}embeddings.token_embedding.weight"),
        Rule("positional_embedding", f"{stem}embeddings.position_embedding.weight"),
        Rule("ln_final.{leaf}", f"{stem}final_layer_norm.{{leaf}}"),
        *(Rule(f"{theirs}.{old}.{{leaf}}", f"{ours}.{new}.{{leaf}}") for old, new in _BLOCKS.items()),
    ]
    for leaf in ("weight", "bias"):
        for n, name in enumerate("qkv"):
            part = Part(f"{theirs}.attn.in_proj_{leaf}", (Share(n, 3),))
            rules.append(Rule(part, f"{ours}.self_attn.{name}_proj.{leaf}"))
    if projected is None:
        last = f"transformer.resblocks.{blocks}.{{rest*}}"
        return Layout("OpenCLIP", tuple(rules), drops=(*_UNUSED, "text_projection", last))
    transposed = (Reshape((-1,)), RowPermutation((-1, projected), (1, 0)), Reshape((projected, -1)))
    rules.append(Rule("text_projection", "text_projection.weight", transposed))
    return Layout("OpenCLIP", tuple(rules), drops=_UNUSED)
