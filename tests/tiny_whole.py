"""Tiny random models whose configs are the published ones but for their sizes, as folders in diffusers' layout and as
single files that hold all of their weights, in the layouts that Stability AI, CompVis and ComfyUI publish."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from original_layouts import kl, open_clip, unet_names, wan_name, z_image
from safetensors.torch import load_file, save_file
from tiny_decoders import qwen3, qwen_tokenizer, qwen_vl
from tiny_text_encoders import clip_model, clip_tokenizer, t5_model, t5_tokenizer
from tiny_unet import REFINER, SD_1, SDXL, unet
from torch import Tensor

from calotype.denoisers.flux import FluxConfig
from calotype.denoisers.sd3_config import SD3Config
from calotype.denoisers.unet_config import unet_config
from calotype.vae.kl_config import KLConfig

from .tiny_flux import in_original_layout as flux_layout
from .tiny_qwen_image import qwen_image_transformer, qwen_image_vae
from .tiny_sd3 import in_original_layout as sd3_layout

CLIP: dict[str, Any] = {"layer_norm_eps": 1e-5, "hidden_size": 64, "num_attention_heads": 1, "num_hidden_layers": 2}
LARGE = {**CLIP, "hidden_size": 128, "num_attention_heads": 2, "projection_dim": 96}
BETAS: dict[str, Any] = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "steps_offset": 1}
DENOISER, WEIGHTS = "model.diffusion_model.", "diffusion_pytorch_model.safetensors"
UNET: dict[str, Any] = {"norm_num_groups": 32, "norm_eps": 1e-5}
_DECODER = {"rms_norm_eps": 1e-6, "num_hidden_layers": 2}
_ROPE = {"rope_type": "default", "rope_theta": 1e6}


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A model: the class of diffusers' pipeline, its parts by their folders, and what makes a file of their weights.
    `index` are further entries of model_index.json."""

    kind: str
    parts: Mapping[str, Any]
    written: Callable[[Mapping[str, Mapping[str, Tensor]]], Mapping[str, Tensor]]
    index: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def save(self, folder: Path) -> Path:
        """The folder, and `name.safetensors` beside it, which is returned."""
        for name, part in self.parts.items():
            part.save_pretrained(folder / name)
        (folder / "model_index.json").write_text(json.dumps({"_class_name": self.kind, **self.index}))
        weights = {path.parent.name: load_file(path) for path in folder.glob("*/*.safetensors")}
        file = folder.with_name(f"{folder.name}.safetensors")
        save_file({name: x.contiguous().clone() for name, x in self.written(weights).items()}, file)
        return file


def prefixed(prefix: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names with a prefix, once."""
    return {f"{prefix}{name.removeprefix(prefix)}": tensor for name, tensor in weights.items()}


def comfy(name: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A text encoder as ComfyUI saves it, with a number of its own."""
    return {
        **prefixed(f"text_encoders.{name}.transformer.", weights),
        f"text_encoders.{name}.logit_scale": torch.tensor(4.6055),
    }


def clip_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """CLIP's names as they were until transformers 5."""
    return {name if name.startswith("text_") else f"text_model.{name}": tensor for name, tensor in weights.items()}


def sd(**sizes: Any) -> Whole:
    """Stable Diffusion 1.5; `sizes` are the UNet's."""
    from diffusers import PNDMScheduler

    entries = {**SD_1, **UNET, "block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 64}
    entries |= {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "attention_head_dim": 8}
    entries |= {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "sample_size": 64, **sizes}
    model = unet(entries)

    def written(weights: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        positions = {"cond_stage_model.transformer.text_model.embeddings.position_ids": torch.arange(77)[None]}
        return {
            **_unet_and_autoencoder(model, weights),
            **prefixed("cond_stage_model.transformer.", clip_names(weights["text_encoder"])),
            **positions,
            "alphas_cumprod": torch.ones(1000),
            "model_ema.num_updates": torch.zeros(()),
        }

    scheduler = PNDMScheduler(**BETAS, skip_prk_steps=True, set_alpha_to_one=False)
    parts = {
        "unet": model,
        "vae": _autoencoder(latent_channels=4, scaling_factor=0.18215),
        "text_encoder": clip_model(projection=False, **CLIP, hidden_act="quick_gelu"),
        "tokenizer": clip_tokenizer(),
        "scheduler": scheduler,
    }
    return Whole(kind="StableDiffusionPipeline", parts=parts, written=written)


def sd2() -> Whole:
    """Stable Diffusion 2.1; OpenCLIP's text encoder has one layer more in the file, and a projection."""
    from diffusers import DDIMScheduler

    entries = {**SD_1, **UNET, "block_out_channels": (64, 128), "layers_per_block": 1, "cross_attention_dim": 64}
    entries |= {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "attention_head_dim": (1, 2)}
    entries |= {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "sample_size": 96}
    model = unet({**entries, "use_linear_projection": True})
    whole = clip_model(projection=True, **{**CLIP, "num_hidden_layers": 3}, projection_dim=64, hidden_act="gelu")
    text = clip_model(projection=False, **CLIP, hidden_act="gelu")
    named = {name.removeprefix("text_model."): x for name, x in whole.state_dict().items()}
    text.load_state_dict({name: named[name.removeprefix("text_model.")] for name in text.state_dict()})

    def written(weights: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {
            **_unet_and_autoencoder(model, weights),
            **prefixed("cond_stage_model.model.", open_clip(whole.state_dict())),
        }

    parts = {
        "unet": model,
        "vae": _autoencoder(latent_channels=4, scaling_factor=0.18215),
        "text_encoder": text,
        "tokenizer": clip_tokenizer("!"),
        "scheduler": DDIMScheduler(**BETAS, clip_sample=False, set_alpha_to_one=False, prediction_type="v_prediction"),
    }
    return Whole(kind="StableDiffusionPipeline", parts=parts, written=written)


def sdxl() -> Whole:
    """Stable Diffusion XL."""
    from diffusers import EulerDiscreteScheduler

    entries = {**SDXL, **UNET, "block_out_channels": (64, 64), "layers_per_block": 2, "cross_attention_dim": 192}
    entries |= {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "sample_size": 128}
    entries |= {"up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "transformer_layers_per_block": (2, 2)}
    entries |= {"attention_head_dim": (1, 1), "addition_time_embed_dim": 256}
    model = unet({**entries, "projection_class_embeddings_input_dim": 6 * 256 + 96})

    def written(weights: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {
            **_unet_and_autoencoder(model, weights),
            **prefixed("conditioner.embedders.0.transformer.", clip_names(weights["text_encoder"])),
            **prefixed("conditioner.embedders.1.model.", open_clip(weights["text_encoder_2"])),
        }

    parts = {
        "unet": model,
        "vae": _autoencoder(latent_channels=4, scaling_factor=0.13025),
        "text_encoder": clip_model(projection=False, **CLIP, hidden_act="quick_gelu"),
        "text_encoder_2": clip_model(projection=True, **LARGE, hidden_act="gelu"),
        "tokenizer": clip_tokenizer(),
        "tokenizer_2": clip_tokenizer("!"),
        "scheduler": EulerDiscreteScheduler(**BETAS, timestep_spacing="leading"),
    }
    return Whole(kind="StableDiffusionXLPipeline", parts=parts, written=written)


def sdxl_refiner() -> Whole:
    """XL's refiner, which has the larger CLIP alone."""
    from diffusers import EulerDiscreteScheduler

    entries = {**REFINER, **UNET, "block_out_channels": (64, 64, 64), "layers_per_block": 2}
    entries |= {"cross_attention_dim": 128, "attention_head_dim": (1, 1, 1), "addition_time_embed_dim": 256}
    model = unet({**entries, "projection_class_embeddings_input_dim": 5 * 256 + 96, "sample_size": 128})

    def written(weights: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        texts = prefixed("conditioner.embedders.0.model.", open_clip(weights["text_encoder_2"]))
        return {**_unet_and_autoencoder(model, weights), **texts}

    parts = {
        "unet": model,
        "vae": _autoencoder(latent_channels=4, scaling_factor=0.13025),
        "text_encoder_2": clip_model(projection=True, **LARGE, hidden_act="gelu"),
        "tokenizer_2": clip_tokenizer("!"),
        "scheduler": EulerDiscreteScheduler(**BETAS, timestep_spacing="leading"),
    }
    index = {"requires_aesthetics_score": True, "force_zeros_for_empty_prompt": False}
    return Whole(kind="StableDiffusionXLImg2ImgPipeline", parts=parts, written=written, index=index)


SD3: dict[str, Any] = {
    "sample_size": 128,
    "num_layers": 2,
    "attention_head_dim": 64,
    "num_attention_heads": 1,
    "caption_projection_dim": 64,
    "joint_attention_dim": 192,
    "pos_embed_max_size": 50,
    "pooled_projection_dim": 64 + 96,
    "qk_norm": "rms_norm",
}


def sd3() -> Whole:
    """Stable Diffusion 3.5; the smaller CLIP's projection is the identity, and in the file any other."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel

    torch.manual_seed(11)
    small = clip_model(projection=True, **CLIP, projection_dim=64, hidden_act="quick_gelu")
    small.text_projection.weight.copy_(torch.eye(64))
    transformer = _drawn(SD3Transformer2DModel(**SD3))

    def written(weights: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        config = SD3Config.from_entries(dict(transformer.config))
        other = {**weights["text_encoder"], "text_projection.weight": torch.ones(64, 64)}
        return {
            **prefixed(DENOISER, sd3_layout(weights["transformer"], config)),
            **comfy("clip_l", other),
            **comfy("clip_g", weights["text_encoder_2"]),
            **comfy("t5xxl", weights["text_encoder_3"]),
            **_first_stage(weights["vae"]),
        }

    parts = {
        "transformer": transformer,
        "vae": _autoencoder(scaling_factor=1.5305, shift_factor=0.0609),
        "text_encoder": small,
        "text_encoder_2": clip_model(projection=True, **LARGE, hidden_act="gelu"),
        "text_encoder_3": _t5(192),
        "tokenizer": clip_tokenizer(),
        "tokenizer_2": clip_tokenizer("!"),
        "tokenizer_3": t5_tokenizer(),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
    }
    return Whole(kind="StableDiffusion3Pipeline", parts=parts, written=written)


def flux() -> Whole:
    """FLUX.1 dev."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

    torch.manual_seed(11)
    transformer = _drawn(
        FluxTransformer2DModel(
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=32,
            num_attention_heads=1,
            axes_dims_rope=(4, 14, 14),
            joint_attention_dim=32,
            pooled_projection_dim=64,
            guidance_embeds=True,
        )
    )

    def written(weights: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        clip = {**clip_names(weights["text_encoder"]), "text_projection.weight": torch.eye(64)}
        return {
            **flux_layout(dict(weights["transformer"]), FluxConfig.from_entries(dict(transformer.config))),
            **comfy("clip_l", clip),
            **comfy("t5xxl", weights["text_encoder_2"]),
            **prefixed("vae.", kl(dict(weights["vae"]), KLConfig(block_out_channels=(32, 32)))),
        }

    parts = {
        "transformer": transformer,
        "vae": _autoencoder(scaling_factor=0.3611, shift_factor=0.1159),
        "text_encoder": clip_model(projection=False, **CLIP, hidden_act="quick_gelu"),
        "text_encoder_2": _t5(32),
        "tokenizer": clip_tokenizer(),
        "tokenizer_2": t5_tokenizer(),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
    }
    return Whole(kind="FluxPipeline", parts=parts, written=written)


def z_image_turbo() -> Whole:
    """Z-Image Turbo."""
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImageTransformer2DModel

    torch.manual_seed(12)
    tokenizer = qwen_tokenizer()
    text = qwen3(tokenizer, **_DECODER, head_dim=8, rope_parameters=_ROPE).model
    sizes = {"dim": 48, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 3, "n_kv_heads": 3, "axes_dims": [4, 6, 6]}
    transformer = _drawn(ZImageTransformer2DModel(**sizes, cap_feat_dim=text.config.hidden_size))

    def written(weights: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        named = {f"model.{name.removeprefix('model.')}": x for name, x in weights["text_encoder"].items()}
        return {
            **z_image(weights["transformer"]),
            **comfy("qwen3_4b", named),
            **prefixed("vae.", kl(dict(weights["vae"]), KLConfig(block_out_channels=(32, 32)))),
        }

    parts = {
        "transformer": transformer,
        "vae": _autoencoder(scaling_factor=0.3611, shift_factor=0.1159),
        "text_encoder": text,
        "tokenizer": tokenizer,
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
    }
    return Whole(kind="ZImagePipeline", parts=parts, written=written)


def qwen_image() -> Whole:
    """Qwen-Image; the autoencoder in Wan's layout."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    tokenizer = qwen_tokenizer()
    heads = {"hidden_size": 128, "num_attention_heads": 1, "num_key_value_heads": 1}
    rope = {"rope_parameters": {**_ROPE, "mrope_section": [16, 24, 24]}}
    text = qwen_vl(tokenizer, {**_DECODER, **heads, **rope}, hidden_size=80, num_heads=1, out_hidden_size=128)
    sizes = {"in_channels": 64, "out_channels": 16, "num_layers": 1, "attention_head_dim": 32}
    sizes |= {"num_attention_heads": 1, "joint_attention_dim": 128, "axes_dims_rope": (4, 14, 14)}
    published = {"z_dim": 16, "latents_mean": _published("latents_mean"), "latents_std": _published("latents_std")}

    def written(weights: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {
            **prefixed(DENOISER, weights["transformer"]),
            **comfy("qwen25_7b", weights["text_encoder"]),
            **{f"vae.{wan_name(name)}": x for name, x in weights["vae"].items()},
        }

    shifts = {"base_shift": 0.5, "max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02}
    parts = {
        "transformer": qwen_image_transformer(**sizes),
        "vae": qwen_image_vae(**published),
        "text_encoder": text,
        "tokenizer": tokenizer,
        "scheduler": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, **shifts),
    }
    return Whole(kind="QwenImagePipeline", parts=parts, written=written)


FAMILIES: dict[str, Callable[[], Whole]] = {
    "sd": sd,
    "sd2": sd2,
    "sdxl": sdxl,
    "sdxl-refiner": sdxl_refiner,
    "sd3": sd3,
    "flux": flux,
    "z-image-turbo": z_image_turbo,
    "qwen-image": qwen_image,
}


def without(whole: Whole, *beginnings: str) -> Whole:
    """The model whose file lacks what begins so."""

    def written(weights: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {name: x for name, x in whole.written(weights).items() if not name.startswith(beginnings)}

    return replace(whole, written=written)


def _unet_and_autoencoder(model: Any, weights: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    names = unet_names(unet_config(dict(model.config)))
    denoiser = {f"{DENOISER}{names(name)}": x for name, x in weights["unet"].items()}
    return {**denoiser, **_first_stage(weights["vae"])}


def _first_stage(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return prefixed("first_stage_model.", kl(dict(weights), KLConfig(block_out_channels=(32, 32))))


def _published(name: str) -> list[float]:
    from calotype.vae.qwen_image import QwenImageVAEConfig

    return list(vars(QwenImageVAEConfig())[name])


def _t5(width: int) -> Any:
    return t5_model(d_model=width, layer_norm_epsilon=1e-6, relative_attention_max_distance=128, num_layers=2)


def _autoencoder(**entries: Any) -> Any:
    from diffusers import AutoencoderKL

    torch.manual_seed(5)
    quantised = entries.get("latent_channels") == 4
    return AutoencoderKL(
        **{"latent_channels": 16, **entries},
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        use_quant_conv=quantised,
        use_post_quant_conv=quantised,
    )


def _drawn(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        is_norm = "norm" in name and parameter.ndim == 1 and name.endswith("weight")
        torch.nn.init.normal_(parameter, 1.0 if is_norm else 0.0, 0.12)
    return model.requires_grad_(False).eval()
