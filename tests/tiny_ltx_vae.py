"""Tiny random autoencoders of LTX-Video, with values that are not diffusers' defaults."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PLAIN: dict[str, Any] = {
    "latent_channels": 4,
    "block_out_channels": [6, 8, 8],
    "down_block_types": ["LTXVideoDownBlock3D"] * 3,
    "decoder_block_out_channels": [6, 8, 8],
    "layers_per_block": [1, 2, 1, 1],
    "decoder_layers_per_block": [1, 1, 2, 1],
    "spatio_temporal_scaling": [True, True, False],
    "decoder_spatio_temporal_scaling": [True, True, False],
    "decoder_inject_noise": [False] * 4,
    "downsample_type": ["conv"] * 3,
    "upsample_residual": [False] * 3,
    "upsample_factor": [1] * 3,
    "patch_size": 2,
    "resnet_norm_eps": 3e-4,
}
TIMED: dict[str, Any] = {
    **PLAIN,
    "block_out_channels": [8, 16, 32, 32, 64],
    "down_block_types": ["LTXVideo095DownBlock3D"] * 4,
    "decoder_block_out_channels": [8, 16, 32],
    "layers_per_block": [1, 1, 2, 1, 1],
    "decoder_layers_per_block": [1, 2, 1, 1],
    "spatio_temporal_scaling": [True] * 4,
    "decoder_spatio_temporal_scaling": [True] * 3,
    "downsample_type": ["spatial", "temporal", "spatiotemporal", "spatiotemporal"],
    "upsample_residual": [True] * 3,
    "upsample_factor": [2] * 3,
    "timestep_conditioning": True,
    "spatial_compression_ratio": 16,
    "temporal_compression_ratio": 8,
}
NOISY: dict[str, Any] = {
    **TIMED,
    "block_out_channels": [6, 8, 8, 10],
    "down_block_types": ["LTXVideoDownBlock3D"] * 4,
    "layers_per_block": [1] * 5,
    "spatio_temporal_scaling": [True, True, True, False],
    "downsample_type": ["conv"] * 4,
    "decoder_inject_noise": [False, True, True, True],
    "spatial_compression_ratio": None,
    "temporal_compression_ratio": None,
}
KINDS = {"0.9.0": PLAIN, "0.9.1": NOISY, "0.9.5": TIMED}
"""4 frames and 8 pixels a latent cell with the first sizes, 8 and 16 with the others."""


def ltx_vae(sizes: dict[str, Any], **changes: Any) -> Any:
    """diffusers' autoencoder."""
    model = ltx_vae_class()(**{**sizes, **changes})
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = 0.9 * parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.2
            is_scale = name.endswith("norm3.weight")
            parameter.copy_(800.0 + noise if parameter.ndim == 0 else scale * noise + is_scale)
        for name, share in (("latents_mean", 0.3), ("latents_std", 0.2)):
            noise = share * torch.randn(model.config.latent_channels, generator=generator)
            model.get_buffer(name).copy_(noise.exp() if name == "latents_std" else noise)
    return model.requires_grad_(False).eval()


def ltx_vae_class() -> Any:
    """diffusers' own."""
    from diffusers.models.autoencoders.autoencoder_kl_ltx import AutoencoderKLLTXVideo

    return AutoencoderKLLTXVideo


_UP = "mid_block up_blocks.0.upsamplers.0 up_blocks.0 up_blocks.1.upsamplers.0 up_blocks.1 up_blocks.2.upsamplers.0"
_DOWN = "down_blocks.0 down_blocks.0.downsamplers.0 down_blocks.0.conv_out down_blocks.1 down_blocks.1.downsamplers.0"
PLACES: dict[str, tuple[str, str]] = {
    "0.9.0": (
        f"{_DOWN} down_blocks.2 mid_block",
        "mid_block up_blocks.0 up_blocks.1.upsamplers.0 up_blocks.1 up_blocks.2.conv_in up_blocks.2.upsamplers.0 "
        "up_blocks.2",
    ),
    "0.9.1": (
        f"{_DOWN} down_blocks.2 down_blocks.2.downsamplers.0 down_blocks.2.conv_out down_blocks.3 mid_block",
        f"{_UP} up_blocks.2",
    ),
    "0.9.5": (
        "down_blocks.0 down_blocks.0.downsamplers.0 down_blocks.1 down_blocks.1.downsamplers.0 "
        "down_blocks.2 down_blocks.2.downsamplers.0 down_blocks.3 down_blocks.3.downsamplers.0 mid_block",
        f"{_UP} up_blocks.2",
    ),
}
"""By kind, the parts of the encoder's and of the decoder's one list in Lightricks' layout, as diffusers calls them."""


def in_original_layout(weights: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """diffusers' names put into Lightricks', without our key map; there are more statistics there."""
    named = {f"vae.{_original_name(name, kind)}": weight for name, weight in weights.items()}
    return named | {"vae.per_channel_statistics.channel": weights["latents_mean"].clone()}


def _original_name(name: str, kind: str) -> str:
    around = {
        "latents_mean": "per_channel_statistics.mean-of-means",
        "latents_std": "per_channel_statistics.std-of-means",
        "decoder.scale_shift_table": "decoder.last_scale_shift_table",
    }
    name = around.get(name, name).replace("decoder.time_embedder", "decoder.last_time_embedder")
    for side, way, parts in (("encoder", "down", PLACES[kind][0]), ("decoder", "up", PLACES[kind][1])):
        for n, part in sorted(enumerate(parts.split()), key=lambda each: -len(each[1])):
            if name.startswith(f"{side}.{part}."):
                name = f"{side}.{way}_blocks.{n}.{name.removeprefix(f'{side}.{part}.')}"
                break
    return (
        name.replace("resnets", "res_blocks")
        .replace("conv_shortcut.conv", "conv_shortcut")
        .replace("norm3", "norm3.norm")
    )


def save_ltx_vae(folder: Path, sizes: dict[str, Any], **changes: Any) -> Any:
    """The same, which is also saved to the folder."""
    model = ltx_vae(sizes, **changes)
    model.save_pretrained(folder)
    return model
