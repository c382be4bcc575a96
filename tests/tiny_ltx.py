"""Tiny random denoisers of LTX-Video's kind, with values that are not diffusers' defaults."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

SIZES: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 10,
    "in_channels": 4,
    "out_channels": 4,
    "cross_attention_dim": 40,
    "caption_channels": 20,
    "num_layers": 2,
    "norm_eps": 3e-4,
}


def ltx_transformer(**changes: Any) -> Any:
    """diffusers' denoiser; every weight matters."""
    from diffusers import LTXVideoTransformer3DModel

    torch.manual_seed(3)
    model = LTXVideoTransformer3DModel(**{**SIZES, **changes})
    for name, parameter in model.named_parameters():
        is_scale = "norm" in name and name.endswith("weight")
        torch.nn.init.normal_(parameter, 1.0 if is_scale else 0.0, 0.15)
    return model.requires_grad_(False).eval()


_ORIGINAL = {"proj_in.": "patchify_proj.", "time_embed.": "adaln_single.", "norm_q.": "q_norm.", "norm_k.": "k_norm."}


def in_original_layout(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """diffusers' names put into Lightricks', as ComfyUI saves them, without our key map."""
    return {f"model.diffusion_model.{_original_name(name)}": weight for name, weight in weights.items()}


def _original_name(name: str) -> str:
    for theirs, original in _ORIGINAL.items():
        name = name.replace(theirs, original)
    return name
