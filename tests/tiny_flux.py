"""Tiny random FLUX.1 pipelines, saved as diffusers saves them."""

from pathlib import Path
from typing import Any

import torch

from calotype.denoisers.flux import FluxConfig

from .tiny_text_encoders import clip_model, save_clip_tokenizer, t5_model, t5_tokenizer

SIZES = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "axes_dims_rope": (4, 6, 6),
}


def flux_pipeline(guided: bool, folder: Path, pipeline: str = "FluxPipeline", **sizes: Any) -> Any:
    """diffusers' pipeline, or the one of this name, of random weights, which is also saved to the folder."""
    import diffusers
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
    from transformers import AutoTokenizer

    torch.manual_seed(11)
    clip, t5 = clip_model(projection=False), t5_model()
    transformer = FluxTransformer2DModel(
        **{**SIZES, **sizes},
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
    pipe = getattr(diffusers, pipeline)(
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


RENAMED = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "final_layer.linear": "proj_out",
    "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
    "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
    "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
    "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
    "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
}
STREAMS = (
    ("img", ("to_q", "to_k", "to_v"), "to_out.0", "ff", "norm1", "norm_"),
    ("txt", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out", "ff_context", "norm1_context", "norm_added_"),
)


def in_original_layout(weights: dict[str, torch.Tensor], config: FluxConfig) -> dict[str, torch.Tensor]:
    """diffusers' names put into the original ones, written without the key map."""
    out: dict[str, torch.Tensor] = {}
    for leaf in ("weight", "bias"):
        present = {new: old for new, old in RENAMED.items() if f"{old}.{leaf}" in weights}
        out |= {f"{new}.{leaf}": weights[f"{old}.{leaf}"] for new, old in present.items()}
        scale, shift = weights[f"norm_out.linear.{leaf}"].chunk(2)
        out[f"final_layer.adaLN_modulation.1.{leaf}"] = torch.cat((shift, scale))
    for i in range(config.layers):
        out |= original_double_block(weights, i)
    for i in range(config.single_layers):
        out |= original_single_block(weights, i)
    return {f"model.diffusion_model.{name}": tensor.contiguous() for name, tensor in out.items()}


def original_double_block(weights: dict[str, torch.Tensor], i: int) -> dict[str, torch.Tensor]:
    old, new, out = f"transformer_blocks.{i}", f"double_blocks.{i}", dict[str, torch.Tensor]()
    for stream, qkv, output, mlp, modulation, norm in STREAMS:
        for leaf in ("weight", "bias"):
            out[f"{new}.{stream}_attn.qkv.{leaf}"] = torch.cat([weights[f"{old}.attn.{n}.{leaf}"] for n in qkv])
            out[f"{new}.{stream}_attn.proj.{leaf}"] = weights[f"{old}.attn.{output}.{leaf}"]
            out[f"{new}.{stream}_mlp.0.{leaf}"] = weights[f"{old}.{mlp}.net.0.proj.{leaf}"]
            out[f"{new}.{stream}_mlp.2.{leaf}"] = weights[f"{old}.{mlp}.net.2.{leaf}"]
            out[f"{new}.{stream}_mod.lin.{leaf}"] = weights[f"{old}.{modulation}.linear.{leaf}"]
        for n, long in (("q", "query"), ("k", "key")):
            out[f"{new}.{stream}_attn.norm.{long}_norm.scale"] = weights[f"{old}.attn.{norm}{n}.weight"]
    return out


def original_single_block(weights: dict[str, torch.Tensor], i: int) -> dict[str, torch.Tensor]:
    old, new, out = f"single_transformer_blocks.{i}", f"single_blocks.{i}", dict[str, torch.Tensor]()
    for leaf in ("weight", "bias"):
        parts = [*(f"{old}.attn.to_{n}.{leaf}" for n in "qkv"), f"{old}.proj_mlp.{leaf}"]
        out[f"{new}.linear1.{leaf}"] = torch.cat([weights[n] for n in parts])
        out[f"{new}.linear2.{leaf}"] = weights[f"{old}.proj_out.{leaf}"]
        out[f"{new}.modulation.lin.{leaf}"] = weights[f"{old}.norm.linear.{leaf}"]
    for n, long in (("q", "query"), ("k", "key")):
        out[f"{new}.norm.{long}_norm.scale"] = weights[f"{old}.attn.norm_{n}.weight"]
    return out
