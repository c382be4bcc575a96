"""The families that `denoise.py` compares: configs of middle and tiny size, and how each side is called.

Nothing of either side is imported before it is asked for, so that a fresh process pays for one alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Case:
    """A family: diffusers' class, its config in middle and tiny size, what the model is told, how it is guided ("told":
    by a value; "batch", "apart": by a second pass, in one batch or after the first), and how diffusers is called."""

    theirs: str
    entries: Mapping[str, Any]
    tiny: Mapping[str, Any]
    channels: int
    text: int
    widths: Mapping[str, str]  # the entries that give the widths of states and pooled text
    guided: Literal["told", "batch", "apart"]
    scale: float
    call: Callable[..., Tensor]
    frames: int = 1  # of the latents


def ours_by_name(name: str, entries: Mapping[str, Any]) -> tuple[Callable[[], Any], Any]:
    """What builds our denoiser, and its key map."""
    if name == "flux":
        from calotype.denoisers.flux import FluxConfig, FluxDenoiser, flux_key_map

        return lambda: FluxDenoiser(FluxConfig.from_entries(entries)), flux_key_map()
    if name == "qwen-image":
        from calotype.denoisers.qwen_image import QwenImageConfig, QwenImageDenoiser, qwen_image_key_map

        return lambda: QwenImageDenoiser(QwenImageConfig.from_entries(entries)), qwen_image_key_map()
    if name == "z-image":
        from calotype.denoisers.z_image import ZImageConfig, ZImageDenoiser
        from calotype.denoisers.z_image_keys import z_image_key_map

        return lambda: ZImageDenoiser(ZImageConfig.from_entries(entries)), z_image_key_map()
    if name == "wan":
        from calotype.denoisers.wan import WanConfig, WanDenoiser, wan_key_map

        return lambda: WanDenoiser(WanConfig.from_entries(entries)), wan_key_map()
    from calotype.denoisers.sd3 import SD3Denoiser
    from calotype.denoisers.sd3_config import SD3Config
    from calotype.denoisers.sd3_keys import sd3_key_map

    config = SD3Config.from_entries(entries)
    return lambda: SD3Denoiser(config), sd3_key_map(config)


def packed(x: Tensor) -> Tensor:
    """[B, C, 1, h, w] to tokens [B, N, 4 C] of 2 x 2 cells."""
    b, c, _, h, w = x.shape
    return x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, 4 * c)


def unpacked(tokens: Tensor, x: Tensor) -> Tensor:
    """The inverse, for latents like x."""
    b, c, _, h, w = x.shape
    return tokens.view(b, h // 2, w // 2, c, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(x.shape)


def call_flux(model: Any, x: Tensor, states: Tensor, pooled: Any, time: Tensor, scale: float) -> Tensor:
    ids = torch.zeros(x.shape[3] // 2, x.shape[4] // 2, 3)
    ids[..., 1] += torch.arange(len(ids))[:, None]
    ids[..., 2] += torch.arange(ids.shape[1])
    out = model(
        hidden_states=packed(x),
        encoder_hidden_states=states,
        pooled_projections=pooled[0],
        timestep=time,
        guidance=torch.full((len(x),), scale),
        img_ids=ids.flatten(0, 1),
        txt_ids=torch.zeros(states.shape[1], 3),
        return_dict=False,
    )[0]
    return unpacked(out, x)


def call_qwen_image(model: Any, x: Tensor, states: Tensor, pooled: Any, time: Tensor) -> Tensor:
    out = model(
        hidden_states=packed(x),
        encoder_hidden_states=states,
        timestep=time,
        img_shapes=[[(1, x.shape[3] // 2, x.shape[4] // 2)]] * len(x),
        return_dict=False,
    )[0]
    return unpacked(out, x)


def call_z_image(model: Any, x: Tensor, states: Tensor, pooled: Any, time: Tensor) -> Tensor:
    return -torch.stack(model(list(x), 1 - time, list(states), return_dict=False)[0])


def call_sd3(model: Any, x: Tensor, states: Tensor, pooled: Any, time: Tensor) -> Tensor:
    told = {"encoder_hidden_states": states, "pooled_projections": pooled[0], "timestep": time * 1000}
    return model(hidden_states=x[:, :, 0], **told, return_dict=False)[0][:, :, None]


def call_wan(model: Any, x: Tensor, states: Tensor, pooled: Any, time: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(states, (0, 0, 0, 512 - states.shape[1]))  # as their pipeline does
    told = {"encoder_hidden_states": padded, "timestep": time * 1000}
    return model(hidden_states=x, **told, return_dict=False)[0]


TINY = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "joint_attention_dim": 24}
CASES = {
    "flux": Case(
        theirs="FluxTransformer2DModel",
        entries={
            "in_channels": 64,
            "num_layers": 4,
            "num_single_layers": 8,
            "num_attention_heads": 6,
            "attention_head_dim": 128,
            "joint_attention_dim": 1024,
            "pooled_projection_dim": 768,
            "guidance_embeds": True,
        },
        tiny={**TINY, "num_single_layers": 2, "axes_dims_rope": (4, 6, 6), "pooled_projection_dim": 20},
        channels=16,
        text=512,
        widths={"states": "joint_attention_dim", "pooled": "pooled_projection_dim"},
        guided="told",
        scale=3.5,
        call=call_flux,
    ),
    "qwen-image": Case(
        theirs="QwenImageTransformer2DModel",
        entries={"num_layers": 8, "num_attention_heads": 6, "attention_head_dim": 128, "joint_attention_dim": 1024},
        tiny={**TINY, "axes_dims_rope": (4, 6, 6)},
        channels=16,
        text=128,
        widths={"states": "joint_attention_dim"},
        guided="apart",
        scale=4.0,
        call=call_qwen_image,
    ),
    "z-image": Case(
        theirs="ZImageTransformer2DModel",
        entries={"dim": 768, "n_heads": 6, "n_kv_heads": 6, "n_layers": 8, "n_refiner_layers": 2, "cap_feat_dim": 1024},
        tiny={"dim": 48, "n_heads": 3, "n_kv_heads": 3, "n_layers": 2, "cap_feat_dim": 24, "axes_dims": [4, 6, 6]},
        channels=16,
        text=128,
        widths={"states": "cap_feat_dim"},
        guided="batch",
        scale=5.0,
        call=call_z_image,
    ),
    "sd3": Case(
        theirs="SD3Transformer2DModel",
        entries={
            "num_layers": 8,
            "num_attention_heads": 12,
            "attention_head_dim": 64,
            "joint_attention_dim": 1024,
            "caption_projection_dim": 768,
            "pooled_projection_dim": 768,
            "qk_norm": "rms_norm",
        },
        tiny={**TINY, "caption_projection_dim": 32, "pooled_projection_dim": 20},
        channels=16,
        text=333,
        widths={"states": "joint_attention_dim", "pooled": "pooled_projection_dim"},
        guided="batch",
        scale=4.5,
        call=call_sd3,
    ),
    "wan": Case(
        theirs="WanTransformer3DModel",
        entries={
            "num_layers": 8,
            "num_attention_heads": 6,
            "attention_head_dim": 128,
            "text_dim": 1024,
            "ffn_dim": 4480,
        },
        tiny={"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 24, "text_dim": 24, "ffn_dim": 64},
        channels=16,
        text=512,
        widths={"states": "text_dim"},
        guided="apart",
        scale=5.0,
        call=call_wan,
        frames=9,
    ),
}
IMAGES = tuple(name for name, case in CASES.items() if case.frames == 1)
"""The families of `denoise.py`; `video.py` has the others."""
