"""Which family a file of weights belongs to, by the names of its tensors; the evidence where that cannot be told."""

from collections.abc import Collection
from pathlib import Path

from ..core.checkpoint import Files
from ..core.component_files import weights_files
from ..core.shapes import Shapes
from ..denoisers.shapes import PREFIXES
from .families import FAMILIES, FolderFamily, titles
from .folders import CONFIG, entries_of

OTHERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("an autoencoder alone, which is given as vae=", ("encoder.conv_in.weight", "decoder.conv_in.weight")),
    ("CLIP's text encoder alone", ("text_model.embeddings.token_embedding.weight",)),
    ("T5's encoder alone", ("encoder.block.0.layer.0.SelfAttention.q.weight",)),
    ("a language model, which calotype.load_language_model loads", ("model.layers.0.self_attn.q_proj.weight",)),
    ("a language model, which calotype.load_language_model loads", ("blk.0.attn_q.weight", "token_embd.weight")),
    ("Chroma", ("distilled_guidance_layer.in_proj.weight",)),
    ("Wan", ("blocks.0.cross_attn.norm_k.weight",)),
    ("HunyuanVideo", ("txt_in.individual_token_refiner.blocks.0.self_attn_qkv.weight",)),
    ("LTX-2", ("audio_patchify_proj.weight",)),
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
    family = _family(names)
    if family is None:
        raise ValueError(f"which family of models it belongs to cannot be told: {_evidence(names)}")
    return family


def check_denoiser(place: Path, variant: str | None, family: FolderFamily) -> None:
    """Makes sure that a folder or a file with a denoiser is not another family's, from its headers.

    Raises:
        ValueError: it is; the message names that family and the one that is wanted.
    """
    names = Shapes.read(weights_files(place, variant), PREFIXES).shapes
    found = _family(names)
    if family.layout.marks.share(names) == 1.0 or (
        found is not None and found.layout.marks.within(family.layout.marks)
    ):
        return
    what = _looks_like(names) if found is None else f"the denoiser of {found.title}"
    if what is not None:
        named = f" ({entries_of(place / CONFIG).get('_class_name')})" if (place / CONFIG).is_file() else ""
        raise ValueError(f"{place} holds {what}{named}; the denoiser of {family.title} is wanted")


def _family(names: Collection[str]) -> FolderFamily | None:
    """The first one whose marks are all there."""
    return next((family for family in FAMILIES if family.layout.marks.share(names) == 1.0), None)


def _looks_like(names: Collection[str]) -> str | None:
    return next((what for what, marks in OTHERS if all(mark in names for mark in marks)), None)


def _evidence(names: Collection[str]) -> str:
    shares = {family.title: family.layout.marks.share(names) for family in FAMILIES}
    lines = [f"{len(names)} tensors, such as {', '.join([*names][:3])}"]
    other = _looks_like(names)
    if other is not None:
        lines.append(f"it looks like {other}")
    nearest = max(shares, key=lambda title: shares[title])
    if shares[nearest] > 0:
        lines.append(f"the nearest family is {nearest}, of whose names {shares[nearest]:.0%} are there")
    return "; ".join((*lines, f"known are {titles()}"))
