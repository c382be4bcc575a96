"""Tiny random UNets of Stable Diffusion's kinds, with values that are not diffusers' defaults."""

from typing import Any

import torch

SD_1: dict[str, Any] = {
    "sample_size": 6,
    "block_out_channels": (8, 16, 24),
    "layers_per_block": 2,
    "norm_num_groups": 4,
    "norm_eps": 1e-4,
    "cross_attention_dim": 32,
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    "attention_head_dim": 2,
    "flip_sin_to_cos": True,
}
SDXL: dict[str, Any] = {
    "sample_size": 6,
    "block_out_channels": (8, 16, 24),
    "layers_per_block": 2,
    "norm_num_groups": 4,
    "cross_attention_dim": 72,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 1, 2),
    "attention_head_dim": (1, 2, 3),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 6 * 8 + 24,
}
REFINER: dict[str, Any] = {
    **SDXL,
    "block_out_channels": (8, 16, 16),
    "layers_per_block": 1,
    "cross_attention_dim": 40,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": 2,
    "attention_head_dim": (1, 2, 2),
    "projection_class_embeddings_input_dim": 5 * 8 + 24,
}


def unet(entries: dict[str, Any], seed: int = 0) -> Any:
    """diffusers' module with weights of which each matters; what it predicts has about unit variance."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(seed)
    model = UNet2DConditionModel(**entries).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.8 * parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.2
            scale *= 3 if ".attn2.to_" in name else 1  # the text shows
            parameter.copy_(scale * torch.randn(parameter.shape) + (parameter.ndim == 1) * 0.5)
        model.conv_out.bias.zero_()
    return model.requires_grad_(False)
