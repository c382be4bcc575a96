"""Tiny random denoisers of Wan's kinds, with values that are not diffusers' defaults."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

SIZES: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 3,
    "attention_head_dim": 14,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 20,
    "freq_dim": 32,
    "ffn_dim": 52,
    "num_layers": 2,
    "eps": 3e-4,
    "rope_max_seq_len": 64,
}
BESIDE = {"in_channels": 11}  # a mask of 3, and the clip's latents
PICTURES = {"image_dim": 18, "added_kv_proj_dim": 42}
KINDS: dict[str, dict[str, Any]] = {
    "text": {},
    "no norm": {"cross_attn_norm": False, "out_channels": None},
    "beside": BESIDE,
    "pictures": BESIDE | PICTURES,
    "first and last": BESIDE | PICTURES | {"pos_embed_seq_len": 10},
}


def wan_transformer(seed: int = 3, **changes: Any) -> Any:
    """diffusers' denoiser; every weight matters."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(seed)
    model = WanTransformer3DModel(**{**SIZES, **changes})
    for name, parameter in model.named_parameters():
        is_scale = "norm" in name and name.endswith("weight")
        torch.nn.init.normal_(parameter, 1.0 if is_scale else 0.0, 0.15)
    return model.requires_grad_(False).eval()


_ORIGINAL = {
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.image_embedder.norm1": "img_emb.proj.0",
    "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
    "condition_embedder.image_embedder.norm2": "img_emb.proj.4",
    "condition_embedder.image_embedder.pos_embed": "img_emb.emb_pos",
    "attn2.add_k_proj": "cross_attn.k_img",
    "attn2.add_v_proj": "cross_attn.v_img",
    "attn2.norm_added_k": "cross_attn.norm_k_img",
    "attn1": "self_attn",
    "attn2": "cross_attn",
    ".to_out.0.": ".o.",
    ".to_": ".",
    ".ffn.net.0.proj": ".ffn.0",
    ".ffn.net.2": ".ffn.2",
    ".norm2.": ".norm3.",
    "proj_out": "head.head",
}


def in_original_layout(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """diffusers' names put into Wan-AI's, as ComfyUI saves them, without our key map."""
    return {f"model.diffusion_model.{_original_name(name)}": weight for name, weight in weights.items()}


def _original_name(name: str) -> str:
    if name == "scale_shift_table":
        return "head.modulation"
    for theirs, original in _ORIGINAL.items():
        name = name.replace(theirs, original)
    return name.replace("scale_shift_table", "modulation")
