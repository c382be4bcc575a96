"""Tiny random parts of Qwen-Image, with values that are not diffusers' defaults."""

import json
from pathlib import Path
from typing import Any

import torch
from tiny_decoders import READS, QwenVLProcessor, qwen_tokenizer, qwen_vl
from tiny_wan_vae import randomised_vae

VAE: dict[str, Any] = {
    "base_dim": 6,
    "z_dim": 4,
    "dim_mult": [1, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True],
    "latents_mean": [-0.31, 0.42, 0.17, -0.23],
    "latents_std": [1.40, 0.80, 1.15, 0.65],
}


def qwen_image_vae(**changes: Any) -> Any:
    """diffusers' autoencoder; 4 pixels a latent cell."""
    from diffusers import AutoencoderKLQwenImage

    return randomised_vae(AutoencoderKLQwenImage(**{**VAE, **changes}))


def save_vae(folder: Path, **changes: Any) -> Any:
    """The same, which is also saved to the folder."""
    model = qwen_image_vae(**changes)
    model.save_pretrained(folder)
    return model


def qwen_image_transformer(**changes: Any) -> Any:
    """diffusers' denoiser for these latents, and for the states of `tiny_decoders.qwen_vl`."""
    from diffusers import QwenImageTransformer2DModel

    torch.manual_seed(11)
    model = QwenImageTransformer2DModel(
        **{
            "in_channels": 4 * VAE["z_dim"],
            "out_channels": VAE["z_dim"],
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "axes_dims_rope": (4, 4, 8),
            **changes,
        }
    )
    for name, parameter in model.named_parameters():
        is_scale = "norm" in name and parameter.ndim == 1
        torch.nn.init.normal_(parameter, 1.0 if is_scale else 0.0, 0.12)
    return model.requires_grad_(False).eval()


def qwen_image_parts(**changes: Any) -> dict[str, Any]:
    """All parts of diffusers' pipelines; `changes` are the denoiser's."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    tokenizer = qwen_tokenizer()
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.55,
        max_shift=0.85,
        base_image_seq_len=4,
        max_image_seq_len=128,
        shift_terminal=0.03,
    )
    return {
        "scheduler": scheduler,
        "vae": qwen_image_vae(),
        "text_encoder": qwen_vl(tokenizer),
        "tokenizer": tokenizer,
        "transformer": qwen_image_transformer(**changes),
    }


def qwen_image_pipeline(folder: Path) -> Any:
    """diffusers' text-to-image pipeline of random weights, which is also saved to the folder."""
    from diffusers import QwenImagePipeline

    pipe = QwenImagePipeline(**qwen_image_parts())
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(folder)
    return pipe


def qwen_image_edit_pipeline(folder: Path, name: str = "QwenImageEditPlusPipeline", **changes: Any) -> Any:
    """diffusers' Edit-Plus pipeline, or the one of this name, of random weights, whose files are also in the folder."""
    import diffusers

    parts = qwen_image_parts(**changes)
    diffusers.QwenImagePipeline(**parts).save_pretrained(folder)
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"_class_name": name, "processor": ["transformers", "Qwen2VLProcessor"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    parts["tokenizer"].save_pretrained(folder / "processor")
    (folder / "processor" / "preprocessor_config.json").write_text(json.dumps(READS))
    pipe = getattr(diffusers, name)(**parts, processor=QwenVLProcessor(parts["tokenizer"]))
    pipe.set_progress_bar_config(disable=True)
    return pipe
