"""The names of an `AutoencoderKL`'s weights: diffusers' (with attention as it was spelt until 2023) and the original.

The original layout (CompVis LDM, BFL, Stability) counts the decoder's levels from the picture, diffusers from the
latents; its attention is of 1x1 convolutions.
"""

from collections.abc import Iterator

from ..core.key_map import KeyMap, Layout, Reshape, Rule

_ATTENTION = "{side}.mid_block.attentions.{i}"
_OLD_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
_ORIGINAL_ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}
PREFIXES = ("first_stage_model.", "vae.")
"""What whole checkpoints put before the names of an autoencoder."""
# The other parts of whole checkpoints (the last: schedules and counters), and what is kept for training alone.
_OTHERS = (
    "model.{any*}",
    "cond_stage_model.{any*}",
    "conditioner.{any*}",
    "text_encoders.{any*}",
    "denoiser.{any*}",
    "model_ema.{any*}",
    "loss.{any*}",
    "{name}",
)


def kl_key_map(levels: int) -> KeyMap:
    """The map of both layouts for a model of `levels` resolutions; targets are diffusers' names."""
    return KeyMap(
        (
            Layout("diffusers", tuple(_diffusers())),
            Layout("original", tuple(_original(levels)), drops=_OTHERS, prefixes=("", *PREFIXES)),
        )
    )


def _diffusers() -> Iterator[Rule]:
    for name in (
        "encoder.down_blocks.{i}.{any*}",
        "decoder.up_blocks.{i}.{any*}",
        "{side}.mid_block.resnets.{i}.{any*}",
        f"{_ATTENTION}.group_norm.{{leaf}}",
        *(f"{{side}}.{part}.{{leaf}}" for part in ("conv_in", "conv_norm_out", "conv_out")),
        "quant_conv.{leaf}",
        "post_quant_conv.{leaf}",
    ):
        yield Rule(name, name)
    for new in _OLD_ATTENTION.values():
        yield from _linear(f"{_ATTENTION}.{new}", f"{_ATTENTION}.{new}")
    for old, new in _OLD_ATTENTION.items():
        yield from _linear(f"{_ATTENTION}.{old}", f"{_ATTENTION}.{new}")


def _original(levels: int) -> Iterator[Rule]:
    for part in ("conv_in", "conv_out"):
        yield Rule(f"{{side}}.{part}.{{leaf}}", f"{{side}}.{part}.{{leaf}}")
    yield Rule("{side}.norm_out.{leaf}", "{side}.conv_norm_out.{leaf}")
    yield Rule("quant_conv.{leaf}", "quant_conv.{leaf}")
    yield Rule("post_quant_conv.{leaf}", "post_quant_conv.{leaf}")
    for place in (0, 1):
        yield from _resnet(f"{{side}}.mid.block_{place + 1}", f"{{side}}.mid_block.resnets.{place}")
    middle = "{side}.mid_block.attentions.0"
    yield Rule("{side}.mid.attn_1.norm.{leaf}", f"{middle}.group_norm.{{leaf}}")
    for old, new in _ORIGINAL_ATTENTION.items():
        yield from _linear(f"{{side}}.mid.attn_1.{old}", f"{middle}.{new}")
    yield from _resnet("encoder.down.{i}.block.{j}", "encoder.down_blocks.{i}.resnets.{j}")
    yield Rule("encoder.down.{i}.downsample.conv.{leaf}", "encoder.down_blocks.{i}.downsamplers.0.conv.{leaf}")
    for level in range(levels):
        old, new = f"decoder.up.{levels - 1 - level}", f"decoder.up_blocks.{level}"
        yield from _resnet(f"{old}.block.{{j}}", f"{new}.resnets.{{j}}")
        yield Rule(f"{old}.upsample.conv.{{leaf}}", f"{new}.upsamplers.0.conv.{{leaf}}")


def _resnet(old: str, new: str) -> Iterator[Rule]:
    yield Rule(f"{old}.{{part}}.{{leaf}}", f"{new}.{{part}}.{{leaf}}")
    yield Rule(f"{old}.nin_shortcut.{{leaf}}", f"{new}.conv_shortcut.{{leaf}}")


def _linear(old: str, new: str) -> Iterator[Rule]:
    """A linear layer that may be stored as a 1x1 convolution."""
    yield Rule(f"{old}.weight", f"{new}.weight", (Reshape((0, -1)),))
    yield Rule(f"{old}.bias", f"{new}.bias")
