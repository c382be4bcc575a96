"""Tiny random Stable Diffusion 3 pipelines, saved as diffusers saves them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from calotype.denoisers.sd3_config import SD3Config

from .tiny_text_encoders import clip_model, save_clip_tokenizer, t5_model, t5_tokenizer

SIZES: dict[str, Any] = {
    "sample_size": 10,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "caption_projection_dim": 32,
    "joint_attention_dim": 80,
    "pos_embed_max_size": 11,
}
KINDS: dict[str, dict[str, Any]] = {
    "3": {"qk_norm": None},
    "large": {"qk_norm": "rms_norm"},
    "medium": {"qk_norm": "rms_norm", "dual_attention_layers": (0,)},
}
RENAMED = {
    "x_embedder.proj": "pos_embed.proj",
    "context_embedder": "context_embedder",
    "final_layer.linear": "proj_out",
    "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
    "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
    "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
}
IN_BLOCKS = {
    "x_block.attn.proj": "attn.to_out.0",
    "x_block.attn2.proj": "attn2.to_out.0",
    "x_block.mlp.fc1": "ff.net.0.proj",
    "x_block.mlp.fc2": "ff.net.2",
    "x_block.adaLN_modulation.1": "norm1.linear",
    "x_block.attn.ln_q": "attn.norm_q",
    "x_block.attn.ln_k": "attn.norm_k",
    "x_block.attn2.ln_q": "attn2.norm_q",
    "x_block.attn2.ln_k": "attn2.norm_k",
    "context_block.attn.proj": "attn.to_add_out",
    "context_block.attn.ln_q": "attn.norm_added_q",
    "context_block.attn.ln_k": "attn.norm_added_k",
    "context_block.mlp.fc1": "ff_context.net.0.proj",
    "context_block.mlp.fc2": "ff_context.net.2",
    "context_block.adaLN_modulation.1": "norm1_context.linear",
}
JOINED = {
    "x_block.attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "x_block.attn2.qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
    "context_block.attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
}


def sd3_pipeline(kind: str, folder: Path, *, t5: bool = True) -> Any:
    """diffusers' pipeline of random weights, which is also saved to the folder."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
    from transformers import AutoTokenizer

    torch.manual_seed(11)
    clip = clip_model(projection=True)
    clip_2 = clip_model(projection=True, hidden_size=40, projection_dim=20, num_hidden_layers=4)
    transformer = SD3Transformer2DModel(
        **SIZES,
        **KINDS[kind],
        pooled_projection_dim=clip.config.projection_dim + clip_2.config.projection_dim,
    )
    for name, parameter in transformer.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm_" in name and ".attn" in name else 0.0, 0.12)
    tokenizers = [
        AutoTokenizer.from_pretrained(save_clip_tokenizer(folder.with_name(f"{folder.name}-clip-{n}"), pad))
        for n, pad in enumerate(("<|endoftext|>", "!"))
    ]
    pipe = StableDiffusion3Pipeline(
        transformer=transformer,
        vae=_autoencoder(),
        text_encoder=clip,
        text_encoder_2=clip_2,
        text_encoder_3=t5_model(d_model=SIZES["joint_attention_dim"]) if t5 else None,
        tokenizer=tokenizers[0],
        tokenizer_2=tokenizers[1],
        tokenizer_3=t5_tokenizer() if t5 else None,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(folder)
    return pipe


def _autoencoder() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        latent_channels=16,
        norm_num_groups=4,
        scaling_factor=0.7,
        shift_factor=0.1,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def in_original_layout(weights: Mapping[str, torch.Tensor], config: SD3Config) -> dict[str, torch.Tensor]:
    """diffusers' names put into the original ones, written without the key map."""
    out = {"pos_embed": weights["pos_embed.pos_embed"]}
    for leaf in ("weight", "bias"):
        out |= {f"{new}.{leaf}": weights[f"{old}.{leaf}"] for new, old in RENAMED.items()}
        out[f"final_layer.adaLN_modulation.1.{leaf}"] = swapped(weights[f"norm_out.linear.{leaf}"])
    for i in range(config.layers):
        old, new = f"transformer_blocks.{i}", f"joint_blocks.{i}"
        for leaf in ("weight", "bias"):
            for name, theirs in IN_BLOCKS.items():
                if (key := f"{old}.{theirs}.{leaf}") in weights:
                    out[f"{new}.{name}.{leaf}"] = weights[key]
            for name, parts in JOINED.items():
                if f"{old}.{parts[0]}.{leaf}" in weights:
                    out[f"{new}.{name}.{leaf}"] = torch.cat([weights[f"{old}.{part}.{leaf}"] for part in parts])
    for leaf in ("weight", "bias"):
        key = f"joint_blocks.{config.layers - 1}.context_block.adaLN_modulation.1.{leaf}"
        out[key] = swapped(out[key])
    return {name: tensor.clone() for name, tensor in out.items()}


def swapped(tensor: torch.Tensor) -> torch.Tensor:
    scale, shift = tensor.chunk(2)
    return torch.cat((shift, scale))
