"""The names in files of LTX-Video's autoencoders."""

from collections.abc import Iterator

from torch import nn

from ..core.key_map import KeyMap, Layout, Rule, named_weights
from .ltx_config import LTXVAEConfig

PREFIXES = ("vae.", "")
_WORDS = (
    ("resnets.", "res_blocks."),
    ("conv_shortcut.conv.", "conv_shortcut."),
    ("norm3.", "norm3.norm."),
)
_AROUND = {
    "latents_mean": "per_channel_statistics.mean-of-means",
    "latents_std": "per_channel_statistics.std-of-means",
    "decoder.time_embedder.": "decoder.last_time_embedder.",
    "decoder.scale_shift_table": "decoder.last_scale_shift_table",
}


def ltx_key_map(module: nn.Module, config: LTXVAEConfig) -> KeyMap:
    """From diffusers' layout, that of the module, and Lightricks' own, in which each half is one list of parts."""
    names, places = named_weights(module), list(_places(config))
    original = tuple(Rule(_original_name(name, places), name) for name in names)
    return KeyMap(
        (
            Layout("diffusers", tuple(Rule(name, name) for name in names)),
            Layout("Lightricks", original, drops=("per_channel_statistics.{any*}",), prefixes=PREFIXES),
        )
    )


def _original_name(name: str, places: list[tuple[str, str]]) -> str:
    """Lightricks' name of a tensor of diffusers'."""
    for ours, theirs in (*_AROUND.items(), *places):
        if name.startswith(ours):
            name = theirs + name.removeprefix(ours)
            break
    for ours, theirs in _WORDS:
        name = name.replace(f".{ours}", f".{theirs}")
    return name


def _places(config: LTXVAEConfig) -> Iterator[tuple[str, str]]:
    """Beginnings of diffusers' names and of Lightricks', parts of parts first."""
    for side, parts in (("encoder.down_blocks", _encoder(config)), ("decoder.up_blocks", _decoder(config))):
        numbered = [(ours, f"{side}.{n}.") for n, ours in enumerate(parts)]
        yield from sorted(numbered, key=lambda pair: -len(pair[0]))


def _encoder(config: LTXVAEConfig) -> Iterator[str]:
    widths, is_later = config.block_out_channels, config.is_later
    for i in range(len(widths) - is_later):
        yield f"encoder.down_blocks.{i}."
        if config.spatio_temporal_scaling[i]:
            yield f"encoder.down_blocks.{i}.downsamplers.0."
        if not is_later and widths[i] != widths[min(i + 1, len(widths) - 1)]:
            yield f"encoder.down_blocks.{i}.conv_out."
    yield "encoder.mid_block."


def _decoder(config: LTXVAEConfig) -> Iterator[str]:
    yield "decoder.mid_block."
    widths, factors = config.decoder_block_out_channels[::-1], config.upsample_factor[::-1]
    width = widths[0]
    for i, (out, factor) in enumerate(zip(widths, factors, strict=False)):
        if width // factor != out // factor:
            yield f"decoder.up_blocks.{i}.conv_in."
        if config.decoder_spatio_temporal_scaling[::-1][i]:
            yield f"decoder.up_blocks.{i}.upsamplers.0."
        yield f"decoder.up_blocks.{i}."
        width = out // factor
