"""Tiny random Z-Image pipelines, saved as diffusers saves them."""

from pathlib import Path
from typing import Any

import tiny_decoders
import tiny_kl
import torch

BASE, TURBO = 5.5, 2.8  # shifts
SIZES: dict[str, Any] = {
    "in_channels": 4,
    "dim": 48,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 3,
    "n_kv_heads": 3,
    "norm_eps": 3e-4,
    "rope_theta": 90.0,
    "t_scale": 700.0,
    "axes_dims": [4, 8, 4],
    "axes_lens": [300, 40, 44],
}


def z_image_pipeline(shift: float, folder: Path) -> Any:
    """diffusers' pipeline of random weights, which is also saved to the folder."""
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel

    torch.manual_seed(12)
    tokenizer = tiny_decoders.qwen_tokenizer()
    qwen3 = tiny_decoders.qwen3(tokenizer).model
    transformer = ZImageTransformer2DModel(**SIZES, cap_feat_dim=qwen3.config.hidden_size)
    for name, parameter in transformer.named_parameters():
        is_norm = parameter.ndim == 1 and name.endswith("weight")
        torch.nn.init.normal_(parameter, 1.0 if is_norm else 0.0, 0.3 if is_norm else 0.12)
    kind = tiny_kl.KINDS["shifted"] | {"latent_channels": SIZES["in_channels"]}
    pipe = ZImagePipeline(
        transformer=transformer.eval().requires_grad_(False),
        vae=tiny_kl.reference(tiny_kl.save(folder.with_name(f"{folder.name}-vae"), kind)),
        text_encoder=qwen3,
        tokenizer=tokenizer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
    )
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(folder)
    return pipe
