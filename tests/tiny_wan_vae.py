"""Tiny random autoencoders of Wan, with values that are not diffusers' defaults."""

from pathlib import Path
from typing import Any

import torch

WAN_2_1: dict[str, Any] = {
    "base_dim": 6,
    "z_dim": 4,
    "dim_mult": [1, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [True, True],
    "latents_mean": [-0.31, 0.42, 0.17, -0.23],
    "latents_std": [1.40, 0.80, 1.15, 0.65],
    "scale_factor_spatial": 4,
}
WAN_2_2: dict[str, Any] = {
    **WAN_2_1,
    "decoder_base_dim": 8,
    "temperal_downsample": [False, True],
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_temporal": 2,
    "scale_factor_spatial": 8,
}


def wan_vae(sizes: dict[str, Any], **changes: Any) -> Any:
    """diffusers' autoencoder; 4 frames a group with the first sizes, 2 with the second."""
    return randomised_vae(wan_vae_class()(**{**sizes, **changes}))


def wan_vae_class() -> Any:
    """diffusers' own."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan

    return AutoencoderKLWan


def randomised_vae(model: Any) -> Any:
    """An autoencoder of Wan's kind with random weights that keep the size of what goes through."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = 0.9 * parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.2
            parameter.copy_(1 + 0.2 * noise if name.endswith("gamma") else scale * noise)
    return model.requires_grad_(False).eval()


def save_wan_vae(folder: Path, sizes: dict[str, Any], **changes: Any) -> Any:
    """The same, which is also saved to the folder."""
    model = wan_vae(sizes, **changes)
    model.save_pretrained(folder)
    return model
