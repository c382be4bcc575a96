"""Names of diffusers' and transformers' weights put into the layouts of original files, without our key maps."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from calotype.denoisers.unet_config import UNetConfig
from calotype.vae.kl_config import KLConfig

_WAN = {
    "conv_in": "conv1",
    "norm_out": "head.0",
    "conv_out": "head.2",
    "mid_block.resnets.0": "middle.0",
    "mid_block.attentions.0": "middle.1",
    "mid_block.resnets.1": "middle.2",
    "down_blocks": "downsamples",
    "conv_shortcut": "shortcut",
    "norm1": "residual.0",
    "conv1.": "residual.2.",
    "norm2": "residual.3",
    "conv2.": "residual.6.",
}


def unet_names(config: UNetConfig) -> Callable[[str], str]:
    """What diffusers' own converter calls a key, turned around."""
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    entries = {**config.entries(), "class_embed_type": None, "num_class_embeds": None}
    candidates = [f"model.diffusion_model.{name}" for name in _every_unet_name(config)]
    marks = {name: torch.tensor(float(i)) for i, name in enumerate(candidates)}
    converted = convert_ldm_unet_checkpoint(dict(marks), entries)
    back = {key: candidates[int(mark)].removeprefix("model.diffusion_model.") for key, mark in converted.items()}
    return back.__getitem__


def _every_unet_name(config: UNetConfig) -> Iterator[str]:
    """Names of all kinds of parts at all places of a model, as the original code calls them."""
    from calotype.denoisers.unet_keys import _RESNET

    assert isinstance(config.layers_per_block, int)
    numbers = range(len(config.block_out_channels) * (config.layers_per_block + 1))
    leaves = ("weight", "bias")
    parts = [f"{side}_blocks.{n}" for side in ("input", "output") for n in numbers]
    resnets = [*(f"{part}.0" for part in parts), "middle_block.0", "middle_block.2"]
    for part in resnets:
        yield from (f"{part}.{name}.{leaf}" for name in _RESNET for leaf in leaves)
    for part in [*(f"{part}.1" for part in parts), "middle_block.1"]:
        yield from (f"{part}.{name}.{leaf}" for name in ("norm", "proj_in", "proj_out") for leaf in leaves)
        for block in (f"{part}.transformer_blocks.{k}" for k in range(10)):
            yield from (f"{block}.norm{n}.{leaf}" for n in (1, 2, 3) for leaf in leaves)
            yield from (f"{block}.ff.net.{n}.{leaf}" for n in ("0.proj", "2") for leaf in leaves)
            for a in ("attn1", "attn2"):
                yield from (f"{block}.{a}.to_{n}.weight" for n in "qkv")
                yield from (f"{block}.{a}.to_out.0.{leaf}" for leaf in leaves)
    yield from (f"{part}.0.op.{leaf}" for part in parts for leaf in leaves)
    for level, kind in enumerate(config.up_block_types):
        last = level * (config.layers_per_block + 1) + config.layers_per_block
        place = 2 if "CrossAttn" in kind else 1  # behind the attention
        yield from (f"output_blocks.{last}.{place}.conv.{leaf}" for leaf in leaves)
    for name in (
        "time_embed.0",
        "time_embed.2",
        "label_emb.0.0",
        "label_emb.0.2",
        "input_blocks.0.0",
        "out.0",
        "out.2",
    ):
        yield from (f"{name}.{leaf}" for leaf in leaves)


def kl(weights: dict[str, Tensor], config: KLConfig) -> dict[str, Tensor]:
    """diffusers' names and shapes to the original ones."""
    names = {
        "mid_block.resnets.0.": "mid.block_1.",
        "mid_block.resnets.1.": "mid.block_2.",
        "mid_block.attentions.0.group_norm.": "mid.attn_1.norm.",
        "mid_block.attentions.0.to_q.": "mid.attn_1.q.",
        "mid_block.attentions.0.to_k.": "mid.attn_1.k.",
        "mid_block.attentions.0.to_v.": "mid.attn_1.v.",
        "mid_block.attentions.0.to_out.0.": "mid.attn_1.proj_out.",
        "down_blocks.": "down.",
        ".downsamplers.0.": ".downsample.",
        ".upsamplers.0.": ".upsample.",
        ".resnets.": ".block.",
        ".conv_shortcut.": ".nin_shortcut.",
        ".conv_norm_out.": ".norm_out.",
    }
    levels = len(config.block_out_channels)
    names |= {f"up_blocks.{level}.": f"up.{levels - 1 - level}." for level in range(levels)}
    return {
        renamed(name, names): weight[:, :, None, None].clone() if is_linear(name, weight) else weight
        for name, weight in weights.items()
    }


def is_linear(name: str, weight: Tensor) -> bool:
    return ".attentions." in name and weight.ndim == 2


def renamed(name: str, names: dict[str, str]) -> str:
    for old, new in names.items():
        name = name.replace(old, new)
    return name


def z_image(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """diffusers' names put into the original ones, written without the key map."""
    out = {"norm_final.weight": torch.ones(3)}
    for name, tensor in weights.items():
        new = name.replace("all_x_embedder.2-1", "x_embedder").replace("all_final_layer.2-1", "final_layer")
        new = new.replace("norm_q", "q_norm").replace("norm_k", "k_norm").replace("to_out.0", "out")
        if "to_k" not in name and "to_v" not in name:
            parts = [weights[name.replace("to_q", part)] for part in ("to_q", "to_k", "to_v")]
            out[new.replace("to_q", "qkv")] = torch.cat(parts) if "to_q" in name else tensor
    return {f"model.diffusion_model.{name}": tensor.contiguous() for name, tensor in out.items()}


def wan_name(name: str) -> str:
    """A name of diffusers' as Wan has it, for two resnets a level of the decoder."""
    if name.startswith(("quant_conv", "post_quant_conv")):
        return name.replace("post_quant_conv", "conv2").replace("quant_conv", "conv1")
    for old, new in reversed(_WAN.items()):
        name = name.replace(old, new)
    parts = name.split(".")
    if parts[1] != "up_blocks":
        return name
    place = 2 if parts[3] == "upsamplers" else int(parts[4])
    return ".".join(("decoder", "upsamples", str(3 * int(parts[2]) + place), *parts[5:]))


def open_clip(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """transformers' CLIP with a projection."""
    out = {"text_projection": weights["text_projection.weight"].T.contiguous(), "logit_scale": torch.ones(())}
    other = ("k_proj", "v_proj", "text_projection")
    renamed = {"layer_norm1": "ln_1", "layer_norm2": "ln_2", "fc1": "c_fc", "fc2": "c_proj", "self_attn": "attn"}
    for name, tensor in weights.items():
        new = name.replace("text_model.encoder.layers", "transformer.resblocks").replace("final_layer_norm", "ln_final")
        for old, short in renamed.items():
            new = new.replace(old, short)
        if "q_proj" in name:
            parts = [weights[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            out[new.replace("q_proj.", "in_proj_")] = torch.cat(parts)
        elif not any(part in name for part in other):
            new = new.replace("text_model.", "").replace("embeddings.position_embedding.weight", "positional_embedding")
            out[new.replace("embeddings.token_embedding", "token_embedding")] = tensor
    return out
