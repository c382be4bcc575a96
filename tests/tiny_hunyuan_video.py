"""Tiny random parts of HunyuanVideo 1.5, and pipelines of them, with values that are not diffusers' defaults."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tiny_decoders import qwen_tokenizer
from tiny_text_encoders import randomised, t5_model
from tiny_wan_vae import randomised_vae
from torch import Tensor

import calotype
from calotype.encoders.hunyuan_video import SYSTEM

SIZES: dict[str, Any] = {
    "in_channels": 9,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "num_refiner_layers": 2,
    "mlp_ratio": 1.5,
    "text_embed_dim": 32,
    "text_embed_2_dim": 20,
    "image_embed_dim": 18,
    "rope_theta": 190.0,
    "rope_axes_dim": (4, 4, 8),
    "target_size": 32,
    "task_type": "t2v",
}
KINDS: dict[str, dict[str, Any]] = {"text": {}, "patches": {"patch_size": 2}, "meanflow": {"use_meanflow": True}}
VAE: dict[str, Any] = {
    "latent_channels": 4,
    "block_out_channels": (8, 16, 16),
    "layers_per_block": 1,
    "spatial_compression_ratio": 4,
    "temporal_compression_ratio": 4,
    "scaling_factor": 0.83,
}
OTHER_VAE: dict[str, Any] = {
    **VAE,
    "block_out_channels": (8, 8, 16),
    "spatial_compression_ratio": 4,
    "temporal_compression_ratio": 2,
    "downsample_match_channel": False,
    "upsample_match_channel": False,
}
"""Half as many frames a latent frame, and layers that change the number of channels."""
PICTURE_SIDE = 12
TEXT_TOKENS = 96  # that diffusers pads prompts to


def hunyuan_video_transformer(seed: int = 3, **changes: Any) -> Any:
    """diffusers' denoiser; every weight matters."""
    from diffusers import HunyuanVideo15Transformer3DModel

    torch.manual_seed(seed)
    model = HunyuanVideo15Transformer3DModel(**{**SIZES, **changes})
    for name, parameter in model.named_parameters():
        is_scale = "norm" in name and name.endswith("weight") and parameter.ndim == 1
        wide = parameter.ndim > 1 and parameter.shape[-1] > 1000
        torch.nn.init.normal_(parameter, 1.0 if is_scale else 0.0, 0.02 if wide else 0.15)
    return model.requires_grad_(False).eval()


def hunyuan_video_vae(sizes: Mapping[str, Any] = VAE) -> Any:
    """diffusers' autoencoder, which takes a row at a time (it cannot do otherwise); 4 pixels a latent cell."""
    from diffusers import AutoencoderKLHunyuanVideo15

    model = randomised_vae(AutoencoderKLHunyuanVideo15(**sizes))
    model.use_slicing = True
    return model


def tokenizer_of_prompts() -> Any:
    """Qwen's, which knows the words around a prompt."""
    return qwen_tokenizer(SYSTEM)


def hunyuan_video_llm(tokenizer: Any) -> Any:
    """The language model, without the eyes that Qwen2.5-VL has."""
    from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

    rope = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [1, 1, 2]}
    config = Qwen2_5_VLTextConfig(
        vocab_size=len(tokenizer) + 3,
        hidden_size=32,
        intermediate_size=44,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=2e-3,
        max_position_embeddings=1200,
        rope_parameters=rope,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=tokenizer.pad_token_id,
    )
    return randomised(Qwen2_5_VLTextModel(config))


def glyph_tokenizer() -> Any:
    """ByT5's."""
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()


def picture_encoder() -> Any:
    """A vision tower of two layers."""
    from transformers import SiglipVisionConfig, SiglipVisionModel

    torch.manual_seed(0)
    config = SiglipVisionConfig(
        hidden_size=18,
        intermediate_size=26,
        num_hidden_layers=2,
        num_attention_heads=3,
        image_size=PICTURE_SIDE,
        patch_size=4,
        layer_norm_eps=3e-4,
    )
    return randomised(SiglipVisionModel(config))


def picture_processor() -> Any:
    """SigLIP's."""
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    return SiglipImageProcessorPil(
        size={"height": PICTURE_SIDE, "width": PICTURE_SIDE}, image_mean=[0.4, 0.5, 0.6], image_std=[0.5, 0.4, 0.3]
    )


def hunyuan_video_pipeline(folder: Path, kind: str = "text", *, scale: float = 6.0, **sizes: Any) -> Any:
    """diffusers' pipeline of random weights, which is also saved to the folder: from text, or with `pictures`;
    `sizes` are the denoiser's."""
    import diffusers

    tokenizer, pictures = tokenizer_of_prompts(), kind == "pictures"
    extra = {"image_encoder": picture_encoder(), "feature_extractor": picture_processor()} if pictures else {}
    sizes = {"task_type": "i2v" if pictures else "t2v", **sizes}
    name = "HunyuanVideo15ImageToVideoPipeline" if pictures else "HunyuanVideo15Pipeline"
    pipe = getattr(diffusers, name)(
        text_encoder=hunyuan_video_llm(tokenizer),
        tokenizer=tokenizer,
        transformer=hunyuan_video_transformer(**sizes),
        vae=hunyuan_video_vae(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.5),
        text_encoder_2=t5_model(vocab_size=384, d_model=SIZES["text_embed_2_dim"]),
        tokenizer_2=glyph_tokenizer(),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=scale),
        **extra,
    )
    pipe.tokenizer_max_length, pipe.vision_num_semantic_tokens = TEXT_TOKENS, (PICTURE_SIDE // 4) ** 2
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(folder)
    return pipe


class HunyuanVideoPipelines:
    """Pipelines by kind, each made once, in folders below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._both: dict[str, tuple[Any, Any]] = {}

    def folder(self, kind: str) -> Path:
        """Where those of a kind are."""
        return self.root / kind

    def both(self, kind: str) -> tuple[Any, Any]:
        """Ours and theirs, of a kind."""
        if kind not in self._both:
            changes = {"distilled": {"scale": 1.0}, "meanflow": {"scale": 1.0, "use_meanflow": True}}.get(kind, {})
            task = "pictures" if kind in ("pictures", "meanflow") else "text"
            theirs = hunyuan_video_pipeline(self.folder(kind), task, **changes)
            self._both[kind] = (calotype.load(self.folder(kind)), theirs)
        return self._both[kind]


_ORIGINAL = (
    ("time_embed.timestep_embedder_r.linear_1", "time_r_in.mlp.0"),
    ("time_embed.timestep_embedder_r.linear_2", "time_r_in.mlp.2"),
    ("time_embed.timestep_embedder.linear_1", "time_in.mlp.0"),
    ("time_embed.timestep_embedder.linear_2", "time_in.mlp.2"),
    ("context_embedder.time_text_embed.timestep_embedder.linear_1", "txt_in.t_embedder.mlp.0"),
    ("context_embedder.time_text_embed.timestep_embedder.linear_2", "txt_in.t_embedder.mlp.2"),
    ("context_embedder.time_text_embed.text_embedder", "txt_in.c_embedder"),
    ("context_embedder.proj_in", "txt_in.input_embedder"),
    ("context_embedder.token_refiner.refiner_blocks", "txt_in.individual_token_refiner.blocks"),
    ("context_embedder_2.norm", "byt5_in.layernorm"),
    ("context_embedder_2.linear_", "byt5_in.fc"),
    ("image_embedder.norm_in", "vision_in.proj.0"),
    ("image_embedder.linear_1", "vision_in.proj.1"),
    ("image_embedder.linear_2", "vision_in.proj.3"),
    ("image_embedder.norm_out", "vision_in.proj.4"),
    ("x_embedder.", "img_in."),
    ("cond_type_embed.", "cond_type_embedding."),
    ("transformer_blocks.", "double_blocks."),
    (".norm1.linear", ".img_mod.linear"),
    (".norm1_context.linear", ".txt_mod.linear"),
    (".ff.net.0.proj", ".img_mlp.fc1"),
    (".ff.net.2", ".img_mlp.fc2"),
    (".ff_context.net.0.proj", ".txt_mlp.fc1"),
    (".ff_context.net.2", ".txt_mlp.fc2"),
    ("proj_out.", "final_layer.linear."),
)
_ATTENTION = {
    "norm_q": "img_attn_q_norm",
    "norm_k": "img_attn_k_norm",
    "norm_added_q": "txt_attn_q_norm",
    "norm_added_k": "txt_attn_k_norm",
    "to_out.0": "img_attn_proj",
    "to_add_out": "txt_attn_proj",
    **{f"to_{n}": f"img_attn_{n}" for n in "qkv"},
    **{f"add_{n}_proj": f"txt_attn_{n}" for n in "qkv"},
}
_REFINER = (
    ("attn.to_out.0", "self_attn_proj"),
    ("img_mlp.", "mlp."),
    ("norm_out.linear", "adaLN_modulation.1"),
)


def in_original_layout(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """diffusers' tensors as Tencent saves them, by its conversion read backwards, without our key map."""
    made: dict[str, Tensor] = {}
    joined: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights.items():
        if name.startswith("norm_out.linear"):
            scale, shift = tensor.chunk(2)
            made[name.replace("norm_out.linear", "final_layer.adaLN_modulation.1")] = torch.cat((shift, scale))
            continue
        renamed = _renamed(name)
        stem, _, rest = renamed.partition(".attn.to_")
        if rest and not renamed.startswith("double_blocks."):
            letter, leaf = rest.split(".")
            joined.setdefault(f"{stem}.self_attn_qkv.{leaf}", {})[letter] = tensor
        else:
            made[renamed] = tensor
    return made | {name: torch.cat([parts[n] for n in "qkv"]) for name, parts in joined.items()}


def in_comfy_layout(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same as ComfyUI repackages it: one matrix for queries, keys and values in each stream."""
    made = in_original_layout(weights)
    for name in [name for name in made if "_attn_q." in name]:
        made[name.replace("_q.", "_qkv.")] = torch.cat([made.pop(name.replace("_q.", f"_{n}.")) for n in "qkv"])
    return made


def _renamed(name: str) -> str:
    for theirs, original in _ORIGINAL:
        name = name.replace(theirs, original)
    if name.startswith("double_blocks."):
        stem, found, rest = name.partition(".attn.")
        layer, _, leaf = rest.rpartition(".")
        return f"{stem}.{_ATTENTION[layer]}.{leaf}" if found else name
    if name.startswith("txt_in.individual"):
        for theirs, original in _REFINER:
            name = name.replace(theirs, original)
    return name


def vae_in_original_layout(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same for the autoencoder."""
    pairs = [("down_blocks", "down"), ("up_blocks", "up"), ("samplers.0.conv", "sample.conv")]
    pairs += [(f"mid_block.resnets.{i}", f"mid.block_{i + 1}") for i in (0, 1)]
    pairs += [("mid_block.attentions.0", "mid.attn_1"), ("resnets", "block"), *((f"to_{n}.", f"{n}.") for n in "qkv")]
    made: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        for theirs, original in pairs:
            name = name.replace(theirs, original)
        made[name] = tensor
    return made
