"""Tiny random Stable Diffusion pipelines, 1.5, XL and XL's refiner, saved as diffusers saves them."""

from pathlib import Path
from typing import Any

import torch

from . import tiny_unet
from .tiny_text_encoders import clip_model, clip_tokenizer

BETAS: dict[str, Any] = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
STABLE: dict[str, Any] = {**BETAS, "steps_offset": 1}
SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "euler": ("EulerDiscreteScheduler", {**STABLE, "timestep_spacing": "leading"}),
    "euler-linspace": ("EulerDiscreteScheduler", {**STABLE, "prediction_type": "v_prediction"}),
    "pndm": ("PNDMScheduler", {**STABLE, "skip_prk_steps": True, "set_alpha_to_one": False}),
    "ddim": ("DDIMScheduler", {**STABLE, "clip_sample": False, "set_alpha_to_one": False}),
    "ddim-v": (
        "DDIMScheduler",
        {**STABLE, "clip_sample": False, "set_alpha_to_one": False, "prediction_type": "v_prediction"},
    ),
    "dpmpp_2m": ("DPMSolverMultistepScheduler", {**STABLE, "use_karras_sigmas": True}),
    "euler_ancestral": ("EulerAncestralDiscreteScheduler", {**STABLE, "timestep_spacing": "trailing"}),
}


def scheduler(name: str) -> Any:
    """diffusers' scheduler."""
    import diffusers

    kind, options = SCHEDULERS[name]
    return getattr(diffusers, kind)(**options)


def sd_pipeline(folder: Path, *, steps: str = "pndm", **sizes: Any) -> Any:
    """Stable Diffusion's kind, with the scheduler `steps`, also saved to the folder; `sizes` are the UNet's."""
    from diffusers import StableDiffusionPipeline

    pipe = StableDiffusionPipeline(
        unet=tiny_unet.unet({**tiny_unet.SD_1, **sizes}),
        vae=vae(0.7),
        text_encoder=clip_model(projection=False),
        tokenizer=clip_tokenizer(),
        scheduler=scheduler(steps),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    return _saved(pipe, folder)


def sdxl_pipeline(folder: Path, *, refiner: bool = False, **sizes: Any) -> Any:
    """XL's kind, base or refiner, with Euler's method, also saved to the folder; `sizes` are the UNet's."""
    from diffusers import StableDiffusionXLImg2ImgPipeline, StableDiffusionXLPipeline

    parts = {
        "unet": tiny_unet.unet({**(tiny_unet.REFINER if refiner else tiny_unet.SDXL), **sizes}, seed=int(refiner)),
        "vae": vae(0.6),
        "text_encoder": None if refiner else clip_model(projection=False),
        "tokenizer": None if refiner else clip_tokenizer(),
        "text_encoder_2": clip_model(projection=True, hidden_size=40, num_attention_heads=5),
        "tokenizer_2": clip_tokenizer(pad="!"),
        "scheduler": scheduler("euler"),
        "add_watermarker": False,
    }
    if refiner:
        settings = {"requires_aesthetics_score": True, "force_zeros_for_empty_prompt": False}
        return _saved(StableDiffusionXLImg2ImgPipeline(**parts, **settings), folder)
    return _saved(StableDiffusionXLPipeline(**parts), folder)


def vae(scale: float) -> Any:
    """An eighth of the pixels a side: diffusers' pipelines take multiples of 8."""
    from diffusers import AutoencoderKL

    torch.manual_seed(5)
    return AutoencoderKL(
        block_out_channels=(4, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        norm_num_groups=4,
        scaling_factor=scale,
    )


def _saved(pipe: Any, folder: Path) -> Any:
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(folder)
    return pipe
