"""Tiny random checkpoints of diffusers' `AutoencoderKL`, with values that are not its defaults."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

WEIGHTS = "diffusion_pytorch_model.safetensors"
COMMON: dict[str, Any] = {"norm_num_groups": 8, "force_upcast": False}
KINDS: dict[str, dict[str, Any]] = {
    "quantised": {"block_out_channels": (16, 32), "layers_per_block": 1, "scaling_factor": 0.7},
    "shifted": {
        "block_out_channels": (16, 32, 24),
        "layers_per_block": 2,
        "latent_channels": 16,
        "scaling_factor": 0.7,
        "shift_factor": 0.1,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    },
    "bare": {
        "block_out_channels": (16, 24),
        "layers_per_block": 1,
        "latent_channels": 4,
        "act_fn": "gelu",
        "scaling_factor": 1.3,
        "shift_factor": -0.4,
        "use_quant_conv": False,
        "mid_block_add_attention": False,
    },
    "statistics": {
        "block_out_channels": (16,),
        "latent_channels": 3,
        "latents_mean": (0.2, -0.7, 1.1),
        "latents_std": (0.8, 2.0, 1.5),
        "scaling_factor": 0.5,
    },
}


def save(folder: Path, kind: dict[str, Any]) -> Path:
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    levels = len(kind["block_out_channels"])
    model = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        **{**COMMON, **kind},
    )
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.9 * parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.2
            parameter.copy_(scale * torch.randn(parameter.shape) + (parameter.ndim == 1))
    model.save_pretrained(folder)
    return folder


def reference(folder: Path) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL.from_pretrained(folder, low_cpu_mem_usage=False).eval().requires_grad_(False)


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target, dirs_exist_ok=True)
    return target


def edit_config(folder: Path, **changes: object) -> None:
    entries = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**entries, **changes}))
