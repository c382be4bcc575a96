"""Pipelines of diffusers whose parts are those of a family here, or nearly, and that do what it does not."""

from collections.abc import Mapping

MISSING: Mapping[str, tuple[str, ...]] = {
    "a ControlNet beside its denoiser": ("ControlNet",),
    "a T2I-Adapter beside its UNet": ("Adapter",),
    "guidance by perturbed attention": ("PAG",),
    "a denoiser that reads the mask and the covered picture beside its latents": ("FluxFill", "VisualCloze"),
    "a denoiser that reads the latents of a control picture (edges, depth) beside its own": ("FluxControl",),
    "a denoiser that makes several layers of a picture at once": ("QwenImageLayered",),
    "a denoiser that reads SigLIP's states of pictures": ("ZImageOmni",),
    "a denoiser that reads the latents of the clip to change beside its own": ("LucyEdit",),
    "a denoiser that reads clips and masks by blocks of their own": ("WanVACE",),
    "a denoiser that reads clips of poses and faces": ("WanAnimate",),
    "a UNet that reads the latents of the picture to change beside its own": ("InstructPix2Pix", "Upscale"),
    "a UNet that reads a map of depth beside its latents": ("Depth2Img",),
    "a UNet that makes maps of a picture": ("Marigold",),
    "a UNet that reads a picture's states in place of a text's": ("ImageVariation", "PaintByExample"),
    "a UNet that is told a picture's vector": ("UnCLIP",),
    "a UNet with layers of motion": ("AnimateDiff", "PIA"),
    "a UNet with layers that read boxes": ("GLIGEN",),
    "an autoencoder of pictures with their depth": ("LDM3D",),
    "a text encoder of another kind": ("Kolors", "AltDiffusion", "BlipDiffusion"),
    "a way of its own to sample": (
        *("SAG", "Panorama", "AttendAndExcite", "Semantic", "DiffEdit", "CycleDiffusion", "Paradigms"),
        *("Pix2PixZero", "ModelEditing", "TextToVideoZero", "MultiPrompt"),
    ),
}
"""What is not here, and what the names of classes hold that need it; the first that fits is said."""


def needs(name: str) -> str:
    """A clause that says what a class of diffusers needs that is not here; "" where that is not known."""
    found = next((what for what, marks in MISSING.items() if any(mark in name for mark in marks)), None)
    return "" if found is None else f", which needs {found}"
