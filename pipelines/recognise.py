"""Which family a file of weights belongs to, by the names of its tensors; the evidence where that cannot be told."""

from collections.abc import Collection

from ..core.checkpoint import Files
from ..core.shapes import Shapes
from ..denoisers.shapes import PREFIXES
from .families import FAMILIES, FolderFamily, titles

OTHERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("an autoencoder alone, which is given as vae=", ("encoder.conv_in.weight", "decoder.conv_in.weight")),
    ("CLIP's text encoder alone", ("text_model.embeddings.token_embedding.weight",)),
    ("T5's encoder alone", ("encoder.block.0.layer.0.SelfAttention.q.weight",)),
    ("a language model, which calotype.load_language_model loads", ("model.layers.0.self_attn.q_proj.weight",)),
    ("a language model, which calotype.load_language_model loads", ("blk.0.attn_q.weight", "token_embd.weight")),
    ("Chroma", ("distilled_guidance_layer.in_proj.weight",)),
    ("Wan", ("blocks.0.cross_attn.norm_k.weight",)),
    ("HunyuanVideo", ("txt_in.individual_token_refiner.blocks.0.self_attn_qkv.weight",)),
    ("LTX-Video", ("patchify_proj.weight", "transformer_blocks.0.scale_shift_table")),
    ("Lumina 2", ("noise_refiner.0.attention.qkv.weight", "cap_embedder.0.weight")),
    ("a ControlNet", ("controlnet_x_embedder.weight",)),
    ("a ControlNet", ("controlnet_cond_embedding.conv_in.weight",)),
)
"""What else files hold, and the names that show it."""


def recognise(files: Files) -> FolderFamily:
    """The family whose denoiser these files hold, from their headers.

    Raises:
        FileNotFoundError, ValueError: a file that is missing, damaged or of a format that cannot be read, or a family
        that cannot be told; the message holds the evidence.
    """
    names = Shapes.read(files, PREFIXES).shapes
    shares = {family.title: family.layout.marks.share(names) for family in FAMILIES}
    for family in FAMILIES:
        if shares[family.title] == 1.0:
            return family
    raise ValueError(f"which family of models it belongs to cannot be told: {_evidence(names, shares)}")


def _evidence(names: Collection[str], shares: dict[str, float]) -> str:
    lines = [f"{len(names)} tensors, such as {', '.join([*names][:3])}"]
    other = next((what for what, marks in OTHERS if all(mark in names for mark in marks)), None)
    if other is not None:
        lines.append(f"it looks like {other}")
    nearest = max(shares, key=lambda title: shares[title])
    if shares[nearest] > 0:
        lines.append(f"the nearest family is {nearest}, of whose names {shares[nearest]:.0%} are there")
    return "; ".join((*lines, f"known are {titles()}"))
