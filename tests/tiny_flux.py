"""Tiny random FLUX.1 pipelines, saved as diffusers saves them."""

from pathlib import Path
from typing import Any

import torch

from .tiny_text_encoders import clip_model, save_clip_tokenizer, t5_model, t5_tokenizer

SIZES = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "axes_dims_rope": (4, 6, 6),
}


def flux_pipeline(guided: bool, folder: Path) -> Any:
    """diffusers' pipeline of random weights, which is also saved to the folder."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import AutoTokenizer

    torch.manual_seed(11)
    clip, t5 = clip_model(projection=False), t5_model()
    transformer = FluxTransformer2DModel(
        **SIZES,
        joint_attention_dim=t5.config.d_model,
        pooled_projection_dim=clip.config.hidden_size,
        guidance_embeds=guided,
    )
    for name, parameter in transformer.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm_" in name and name.endswith("weight") else 0.0, 0.12)
    vae = AutoencoderKL(
        block_out_channels=(8, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        latent_channels=4,
        norm_num_groups=4,
        scaling_factor=0.7,
        shift_factor=0.1,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(
        shift=3.0 if guided else 1.0, use_dynamic_shifting=guided, base_image_seq_len=8, max_image_seq_len=64
    )
    pipe = FluxPipeline(
        transformer=transformer,
        vae=vae,
        text_encoder=clip,
        text_encoder_2=t5,
        tokenizer=AutoTokenizer.from_pretrained(save_clip_tokenizer(folder.with_name(f"{folder.name}-clip"))),
        tokenizer_2=t5_tokenizer(),
        scheduler=scheduler,
    )
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(folder)
    return pipe
