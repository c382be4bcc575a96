"""Tiny random pipelines of Wan's kinds, with values that are not diffusers' defaults."""

from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from tiny_text_encoders import randomised, t5_model, t5_tokenizer
from tiny_wan import wan_transformer
from tiny_wan_vae import WAN_2_1, WAN_2_2, wan_vae

import calotype

SIZES: dict[str, Any] = {"text_dim": 32}
BESIDE = {"in_channels": 12}  # latents, a mask of 4, latents of the pictures
PICTURES: dict[str, Any] = {"image_dim": 18, "added_kv_proj_dim": 42}
TOKENS = 1 + (12 // 4) ** 2  # of a picture


def unipc(**changes: Any) -> Any:
    """Wan's scheduler."""
    from diffusers import UniPCMultistepScheduler

    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 2.6}
    return UniPCMultistepScheduler(**{**flow, **changes})


def euler() -> Any:
    """The other one that Wan's folders may have."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(shift=2.2)


def picture_encoder() -> Any:
    """A vision tower of three layers, and its processor."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    torch.manual_seed(0)
    config = CLIPVisionConfig(
        hidden_size=18,
        intermediate_size=26,
        num_hidden_layers=3,
        num_attention_heads=3,
        image_size=12,
        patch_size=4,
        hidden_act="gelu",
        layer_norm_eps=3e-4,
    )
    return randomised(CLIPVisionModel(config))


def picture_processor() -> Any:
    """CLIP's."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    return CLIPImageProcessorPil(size={"shortest_edge": 14}, crop_size={"height": 12, "width": 12})


def wan_pipeline(folder: Path, kind: str = "text", *, scheduler: Any = None, **sizes: Any) -> Any:
    """diffusers' pipeline of random weights, which is also saved to the folder; 4 pixels a latent cell, 4 frames a
    group, but 8 and 2 with `first`; `sizes` are the denoiser's."""
    import diffusers

    changes, extra = _KINDS[kind]
    extra = dict(extra)
    if extra.pop("experts", False):
        extra |= {"transformer_2": wan_transformer(seed=8, **SIZES, **changes), "boundary_ratio": 0.6}
    if changes.get("image_dim"):
        extra |= {"image_encoder": picture_encoder(), "image_processor": picture_processor()}
    name = "WanImageToVideoPipeline" if "in_channels" in changes else "WanPipeline"
    pipe = getattr(diffusers, name)(
        tokenizer=t5_tokenizer(),
        text_encoder=t5_model(umt5=True),
        vae=wan_vae(WAN_2_2 if kind == "first" else WAN_2_1),
        scheduler=unipc() if scheduler is None else scheduler,
        transformer=wan_transformer(**{**SIZES, **changes, **sizes}),
        **extra,
    )
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(folder)
    return pipe


class WanPipelines:
    """Pipelines by kind, each made once, in folders below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._made: dict[str, tuple[Path, Any]] = {}
        self._both: dict[str, tuple[Any, Any]] = {}

    def made(self, kind: str) -> tuple[Path, Any]:
        """The folder of a kind, and diffusers' pipeline of it."""
        if kind not in self._made:
            folder = self.root / kind.replace(" ", "-")
            self._made[kind] = (folder, wan_pipeline(folder, kind))
        return self._made[kind]

    def both(self, kind: str) -> tuple[Any, Any]:
        """Ours and theirs, of a kind."""
        if kind not in self._both:
            folder, theirs = self.made(kind)
            self._both[kind] = (calotype.load(folder), theirs)
        return self._both[kind]


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """One of random pixels."""
    levels = numpy.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=numpy.uint8)
    return Image.fromarray(levels)


_KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text": ({}, {}),
    "experts": ({}, {"experts": True}),
    "first": ({}, {"expand_timesteps": True}),
    "pictures": ({**BESIDE, **PICTURES}, {}),
    "first and last": ({**BESIDE, **PICTURES, "pos_embed_seq_len": 2 * TOKENS}, {}),
    "beside": (BESIDE, {"experts": True}),
}
