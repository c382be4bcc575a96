"""The names in files of HunyuanVideo 1.5's autoencoder."""

from collections.abc import Iterator

from torch import nn

from ..core.key_map import KeyMap, Layout, Rule, named_weights

PREFIXES = ("", "vae.", "first_stage_model.")


def hunyuan_video_vae_key_map(module: nn.Module) -> KeyMap:
    """diffusers' layout, that of the module, and Tencent's own."""
    diffusers = Layout("diffusers", tuple(Rule(name, name) for name in named_weights(module)))
    return KeyMap((diffusers, Layout("Tencent", tuple(_original()), prefixes=PREFIXES)))


def _original() -> Iterator[Rule]:
    for side, way, sampler in (("encoder", "down", "downsample"), ("decoder", "up", "upsample")):
        theirs, ours = f"{side}.{way}.{{i}}", f"{side}.{way}_blocks.{{i}}"
        for conv in ("conv_in", "conv_out"):
            yield Rule(f"{side}.{conv}.conv.{{leaf}}", f"{side}.{conv}.conv.{{leaf}}")
        yield Rule(f"{side}.norm_out.gamma", f"{side}.norm_out.gamma")
        yield from _resnet(f"{theirs}.block.{{j}}", f"{ours}.resnets.{{j}}")
        yield Rule(f"{theirs}.{sampler}.conv.conv.{{leaf}}", f"{ours}.{sampler}rs.0.conv.conv.{{leaf}}")
        for place in (0, 1):
            yield from _resnet(f"{side}.mid.block_{place + 1}", f"{side}.mid_block.resnets.{place}")
        theirs, ours = f"{side}.mid.attn_1", f"{side}.mid_block.attentions.0"
        yield Rule(f"{theirs}.norm.gamma", f"{ours}.norm.gamma")
        yield Rule(f"{theirs}.proj_out.{{leaf}}", f"{ours}.proj_out.{{leaf}}")
        for name in "qkv":
            yield Rule(f"{theirs}.{name}.{{leaf}}", f"{ours}.to_{name}.{{leaf}}")


def _resnet(theirs: str, ours: str) -> Iterator[Rule]:
    for norm in ("norm1", "norm2"):
        yield Rule(f"{theirs}.{norm}.gamma", f"{ours}.{norm}.gamma")
    for conv in ("conv1", "conv2"):
        yield Rule(f"{theirs}.{conv}.conv.{{leaf}}", f"{ours}.{conv}.conv.{{leaf}}")
