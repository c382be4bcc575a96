"""The names in files of Wan's autoencoders, and of Qwen-Image's, which is one of Wan 2.1's kind."""

from collections.abc import Iterator

from torch import nn

from ..core.key_map import KeyMap, Layout, Rule, named_weights

PREFIXES = ("", "vae.", "first_stage_model.")


def wan_key_map(module: nn.Module, *, num_levels: int, num_res_blocks: int, nested: bool = False) -> KeyMap:
    """From diffusers' layout, that of the module, and Wan's own; `nested` levels are Wan 2.2's."""
    diffusers = Layout("diffusers", tuple(Rule(name, name) for name in named_weights(module)))
    levels = _nested(num_res_blocks) if nested else _listed(num_levels, num_res_blocks)
    return KeyMap((diffusers, Layout("Wan", (*_common(), *levels), prefixes=PREFIXES)))


def _common() -> Iterator[Rule]:
    """What is around the levels."""
    for side in ("encoder", "decoder"):
        yield Rule(f"{side}.conv1.{{leaf}}", f"{side}.conv_in.{{leaf}}")
        yield Rule(f"{side}.head.0.{{leaf}}", f"{side}.norm_out.{{leaf}}")
        yield Rule(f"{side}.head.2.{{leaf}}", f"{side}.conv_out.{{leaf}}")
        yield from _resnet(f"{side}.middle.0", f"{side}.mid_block.resnets.0")
        yield Rule(f"{side}.middle.1.{{part}}.{{leaf}}", f"{side}.mid_block.attentions.0.{{part}}.{{leaf}}")
        yield from _resnet(f"{side}.middle.2", f"{side}.mid_block.resnets.1")
    yield Rule("conv1.{leaf}", "quant_conv.{leaf}")
    yield Rule("conv2.{leaf}", "post_quant_conv.{leaf}")


def _listed(num_levels: int, num_res_blocks: int) -> Iterator[Rule]:
    """Levels are one list, each of its blocks and, but for the last, a resampler."""
    yield from _level("encoder.downsamples.{i}", "encoder.down_blocks.{i}", "encoder.down_blocks.{i}")
    blocks = num_res_blocks + 1
    for level in range(num_levels):
        ours = f"decoder.up_blocks.{level}"
        for place in range(blocks + 1):
            theirs = f"decoder.upsamples.{level * (blocks + 1) + place}"
            yield from _level(theirs, f"{ours}.resnets.{place}", f"{ours}.upsamplers.0")


def _nested(num_res_blocks: int) -> Iterator[Rule]:
    """Levels are a list of such lists."""
    for side, way, blocks in (("encoder", "down", num_res_blocks), ("decoder", "up", num_res_blocks + 1)):
        theirs, ours = f"{side}.{way}samples.{{i}}.{way}samples", f"{side}.{way}_blocks.{{i}}"
        for place in range(blocks):
            yield from _resnet(f"{theirs}.{place}", f"{ours}.resnets.{place}")
        yield from _resampler(f"{theirs}.{blocks}", f"{ours}.{way}sampler")


def _level(theirs: str, resnet: str, resampler: str) -> Iterator[Rule]:
    """One entry of a list of levels, which is either."""
    yield from _resnet(theirs, resnet)
    yield from _resampler(theirs, resampler)


def _resampler(theirs: str, ours: str) -> Iterator[Rule]:
    yield Rule(f"{theirs}.resample.1.{{leaf}}", f"{ours}.resample.1.{{leaf}}")
    yield Rule(f"{theirs}.time_conv.{{leaf}}", f"{ours}.time_conv.{{leaf}}")


def _resnet(theirs: str, ours: str) -> Iterator[Rule]:
    for place, name in ((0, "norm1"), (2, "conv1"), (3, "norm2"), (6, "conv2")):
        yield Rule(f"{theirs}.residual.{place}.{{leaf}}", f"{ours}.{name}.{{leaf}}")
    yield Rule(f"{theirs}.shortcut.{{leaf}}", f"{ours}.conv_shortcut.{{leaf}}")
