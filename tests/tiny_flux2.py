"""Tiny random FLUX.2 pipelines, saved as diffusers saves them."""

from pathlib import Path
from typing import Any

import torch
from tiny_decoders import mistral3, mistral_tokenizer, qwen3, qwen_tokenizer

SIZES = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "timestep_guidance_channels": 32,
    "mlp_ratio": 2.5,
    "axes_dims_rope": (2, 4, 4, 6),
    "rope_theta": 700,
    "eps": 2e-6,
}
DOWNSAMPLING = 8


def flux2_pipeline(kind: str, folder: Path) -> Any:
    """diffusers' pipeline of random weights, of the kind "dev", "klein", "klein base" or "klein kv"; it is also
    saved."""
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        Flux2KleinKVPipeline,
        Flux2KleinPipeline,
        Flux2Pipeline,
        Flux2Transformer2DModel,
    )

    torch.manual_seed(12)
    is_dev = kind == "dev"
    tokenizer = mistral_tokenizer() if is_dev else qwen_tokenizer()
    encoder = mistral3(tokenizer, num_hidden_layers=31) if is_dev else qwen3(tokenizer, num_hidden_layers=28)
    width = encoder.config.get_text_config().hidden_size
    transformer = Flux2Transformer2DModel(**SIZES, joint_attention_dim=3 * width, guidance_embeds=is_dev)
    for name, parameter in transformer.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm_q" in name or "norm_k" in name else 0.0, 0.12)
    parts = {
        "transformer": transformer.eval(),
        "vae": autoencoder(),
        "text_encoder": encoder,
        "tokenizer": tokenizer,
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
    }
    if kind in ("dev", "klein kv"):
        pipe = (Flux2Pipeline if is_dev else Flux2KleinKVPipeline)(**parts)
    else:
        pipe = Flux2KleinPipeline(**parts, is_distilled=kind == "klein")
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(folder)
    return pipe


def autoencoder(**more: Any) -> Any:
    """Three levels, so that a latent cell is 8 pixels a side, with statistics that are not those of a new one."""
    from diffusers import AutoencoderKLFlux2

    settings = {
        "block_out_channels": (8, 12, 16),
        "down_block_types": ("DownEncoderBlock2D",) * 3,
        "up_block_types": ("UpDecoderBlock2D",) * 3,
        "layers_per_block": 1,
        "latent_channels": 4,
        "norm_num_groups": 4,
        "batch_norm_eps": 3e-2,
    }
    vae = AutoencoderKLFlux2(**{**settings, **more}).eval().requires_grad_(False)
    channels = vae.bn.num_features
    vae.bn.running_mean.copy_(0.3 * torch.randn(channels, generator=torch.Generator().manual_seed(1)))
    vae.bn.running_var.copy_(0.2 + torch.rand(channels, generator=torch.Generator().manual_seed(2)))
    return vae


RENAMED = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "final_layer.linear": "proj_out",
    "time_in.in_layer": "time_guidance_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_guidance_embed.timestep_embedder.linear_2",
    "guidance_in.in_layer": "time_guidance_embed.guidance_embedder.linear_1",
    "guidance_in.out_layer": "time_guidance_embed.guidance_embedder.linear_2",
    "double_stream_modulation_img.lin": "double_stream_modulation_img.linear",
    "double_stream_modulation_txt.lin": "double_stream_modulation_txt.linear",
    "single_stream_modulation.lin": "single_stream_modulation.linear",
}
STREAMS = (
    ("img", ("to_q", "to_k", "to_v"), "to_out.0", "ff", "norm_"),
    ("txt", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out", "ff_context", "norm_added_"),
)


def in_original_layout(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """diffusers' names put into Black Forest Labs', written without the key map."""
    present = {new: old for new, old in RENAMED.items() if f"{old}.weight" in weights}
    out = {f"{new}.weight": weights[f"{old}.weight"] for new, old in present.items()}
    scale, shift = weights["norm_out.linear.weight"].chunk(2)
    out["final_layer.adaLN_modulation.1.weight"] = torch.cat((shift, scale))
    for i in range(_count(weights, "transformer_blocks.")):
        old, new = f"transformer_blocks.{i}", f"double_blocks.{i}"
        for stream, qkv, output, mlp, norm in STREAMS:
            out[f"{new}.{stream}_attn.qkv.weight"] = torch.cat([weights[f"{old}.attn.{n}.weight"] for n in qkv])
            out[f"{new}.{stream}_attn.proj.weight"] = weights[f"{old}.attn.{output}.weight"]
            out[f"{new}.{stream}_mlp.0.weight"] = weights[f"{old}.{mlp}.linear_in.weight"]
            out[f"{new}.{stream}_mlp.2.weight"] = weights[f"{old}.{mlp}.linear_out.weight"]
            for n, long in (("q", "query"), ("k", "key")):
                out[f"{new}.{stream}_attn.norm.{long}_norm.scale"] = weights[f"{old}.attn.{norm}{n}.weight"]
    for i in range(_count(weights, "single_transformer_blocks.")):
        old, new = f"single_transformer_blocks.{i}.attn", f"single_blocks.{i}"
        out[f"{new}.linear1.weight"] = weights[f"{old}.to_qkv_mlp_proj.weight"]
        out[f"{new}.linear2.weight"] = weights[f"{old}.to_out.weight"]
        for n, long in (("q", "query"), ("k", "key")):
            out[f"{new}.norm.{long}_norm.scale"] = weights[f"{old}.norm_{n}.weight"]
    return {name: tensor.contiguous() for name, tensor in out.items()}


def _count(weights: dict[str, torch.Tensor], stem: str) -> int:
    return len({name.split(".")[1] for name in weights if name.startswith(stem)})
