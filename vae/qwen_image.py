"""The autoencoder of Qwen-Image, for pictures: diffusers' `AutoencoderKLQwenImage` behind our interface.

It is that of Wan 2.1, causal in time. A picture is its first frame: before it there is nothing, so that of every
convolution the last slice in time alone counts, and no cache of earlier frames is needed.

Legend: B rows, C channels, H W pixels, h w latent cells.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.checkpoint import Files
from ..core.component_files import component_weights
from ..core.diffusers_config import FLAGS, NUMBERS, SIZE, SIZES, Kind, checked, made, read_config
from ..core.key_map import KeyMap, Layout, Rule, named_weights
from ..core.loading import build_on_meta, load_weights
from .kl import KLAutoencoder
from .kl_config import KLConfig
from .tiling import Tiling

CLASS_NAME = "AutoencoderKLQwenImage"


@dataclass(frozen=True, kw_only=True)
class QwenImageVAEConfig:
    """diffusers' entries by diffusers' names and with its defaults; latents are (z - latents_mean) / latents_std.

    Raises ValueError for entries that contradict each other.
    """

    base_dim: int = 96
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temperal_downsample: tuple[bool, ...] = (False, True, True)
    input_channels: int = 3
    # fmt: off
    latents_mean: tuple[float, ...] = (
        -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
        0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
    )
    latents_std: tuple[float, ...] = (
        2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
        3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
    )
    # fmt: on

    def __post_init__(self) -> None:
        if len(self.temperal_downsample) != len(self.dim_mult) - 1:
            counts = f"{len(self.temperal_downsample)} entries for {len(self.dim_mult)} of dim_mult"
            raise ValueError(f"temperal_downsample has {counts}; it has one for each but the last")
        if self.input_channels != 3:
            raise ValueError(f"input_channels is {self.input_channels}; only pictures of 3 can be made")
        self.space()

    def space(self) -> KLConfig:
        """What is common to all autoencoders of this kind: channels, levels, and the latents' means and deviations."""
        return KLConfig(
            latent_channels=self.z_dim,
            block_out_channels=tuple(self.base_dim * each for each in self.dim_mult),
            layers_per_block=self.num_res_blocks,
            scaling_factor=1.0,
            latents_mean=self.latents_mean,
            latents_std=self.latents_std,
        )


def read_qwen_image_vae_config(folder: Path) -> QwenImageVAEConfig:
    """The config of a folder in diffusers' layout.

    Raises:
        FileNotFoundError: it has no config.json. ValueError: that is not the config of an `AutoencoderKLQwenImage`, or
        has an entry that is not known or of another type.
    """
    return read_config(folder, "an autoencoder", _config)


class QwenImageAutoencoder(KLAutoencoder):
    """Maps pictures in -1..1 to normalised latents and back, as `KLAutoencoder` does; `config` is its latent space."""

    def _half(self, *names: str | None) -> nn.Module:
        return _OneFrame(super()._half(*names))


class PictureConv(nn.Module):
    """A causal convolution with all its weights [O, I, T, kh, kw], for a clip of one frame."""

    def __init__(self, causal: nn.Conv3d, padding: tuple[int, int]) -> None:
        super().__init__()
        self.weight, self.bias = causal.weight, causal.bias
        self.padding = padding

    def forward(self, x: Tensor) -> Tensor:
        """[B, I, 1, H, W] to [B, O, 1, H, W]."""
        return functional.conv2d(x[:, :, 0], self.weight[:, :, -1], self.bias, padding=self.padding)[:, :, None]


def load_qwen_image_vae(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    variant: str | None = None,
    tiling: Tiling | None = None,
    slicing: bool = False,
) -> QwenImageAutoencoder:
    """The autoencoder of a folder in diffusers' layout; arguments and errors as for `load_kl`."""
    folder = Path(folder)
    config = read_qwen_image_vae_config(folder)
    try:
        module = _build(config)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from None
    files = component_weights(folder, variant)
    return _loaded(module, config, files, device=device, dtype=dtype, tiling=tiling, slicing=slicing)


def load_qwen_image_vae_file(
    files: Files,
    config: QwenImageVAEConfig = QwenImageVAEConfig(),
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    tiling: Tiling | None = None,
    slicing: bool = False,
) -> QwenImageAutoencoder:
    """The autoencoder of a file in Wan's layout, as ComfyUI has it, or diffusers'. Errors as for `load_kl`."""
    return _loaded(_build(config), config, files, device=device, dtype=dtype, tiling=tiling, slicing=slicing)


def _loaded(
    module: nn.Module,
    config: QwenImageVAEConfig,
    files: Files,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    tiling: Tiling | None,
    slicing: bool,
) -> QwenImageAutoencoder:
    diffusers = Layout("diffusers", tuple(Rule(name, name) for name in named_weights(module)))
    original = Layout("Wan", tuple(_original(config)), prefixes=("", "vae.", "first_stage_model."))
    load_weights(module, files, KeyMap((diffusers, original)), dtype=dtype, device=device)
    module.requires_grad_(False).eval()
    return QwenImageAutoencoder(module=module, config=config.space(), tiling=tiling, slicing=slicing)


class _OneFrame(nn.Module):
    """A network of clips as one of pictures."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] to [B, C', H', W']."""
        return self.network(x[:, :, None])[:, :, 0]


def _build(config: QwenImageVAEConfig) -> nn.Module:
    """diffusers' module on the meta device, for pictures. Raises ValueError for sizes that make none."""
    from diffusers.models.autoencoders import autoencoder_kl_qwenimage as theirs

    build: Any = theirs.AutoencoderKLQwenImage
    entries = {name: list(each) if isinstance(each, tuple) else each for name, each in vars(config).items()}
    module: nn.Module = made(CLASS_NAME, lambda: build_on_meta(lambda: build(**entries)))
    causal: Any = theirs.QwenImageCausalConv3d
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, causal):
                conv = cast(Any, child)
                left, _, top, *_ = conv._padding
                setattr(parent, name, PictureConv(conv, (top, left)))
    return module


def _config(entries: Mapping[str, object]) -> QwenImageVAEConfig:
    name = entries.get("_class_name")
    if name != CLASS_NAME:
        raise ValueError(f"the config's _class_name is {name!r}; this autoencoder is {CLASS_NAME!r}")
    values: dict[str, Any] = {}
    for key, value in entries.items():
        if key.startswith("_") or key == "dropout" or (key == "attn_scales" and value == []):
            continue
        if key not in _KINDS:
            raise ValueError(f"the config's {key} is {value!r}; known entries are {', '.join(_KINDS)}")
        values[key] = checked(key, value, _KINDS)
    return QwenImageVAEConfig(**values)


_KINDS: Mapping[str, Kind] = {
    "base_dim": SIZE,
    "z_dim": SIZE,
    "dim_mult": SIZES,
    "num_res_blocks": SIZE,
    "temperal_downsample": FLAGS,
    "input_channels": SIZE,
    "latents_mean": NUMBERS,
    "latents_std": NUMBERS,
}


def _original(config: QwenImageVAEConfig) -> Iterator[Rule]:
    """Wan's own names: levels are one list there, each of its blocks and, but for the last, a resampler."""
    for side in ("encoder", "decoder"):
        yield Rule(f"{side}.conv1.{{leaf}}", f"{side}.conv_in.{{leaf}}")
        yield Rule(f"{side}.head.0.{{leaf}}", f"{side}.norm_out.{{leaf}}")
        yield Rule(f"{side}.head.2.{{leaf}}", f"{side}.conv_out.{{leaf}}")
        yield from _resnet(f"{side}.middle.0", f"{side}.mid_block.resnets.0")
        yield Rule(f"{side}.middle.1.{{part}}.{{leaf}}", f"{side}.mid_block.attentions.0.{{part}}.{{leaf}}")
        yield from _resnet(f"{side}.middle.2", f"{side}.mid_block.resnets.1")
    yield Rule("conv1.{leaf}", "quant_conv.{leaf}")
    yield Rule("conv2.{leaf}", "post_quant_conv.{leaf}")
    yield from _level("encoder.downsamples.{i}", "encoder.down_blocks.{i}", "encoder.down_blocks.{i}")
    blocks = config.num_res_blocks + 1
    for level in range(len(config.dim_mult)):
        ours = f"decoder.up_blocks.{level}"
        for place in range(blocks + 1):
            theirs = f"decoder.upsamples.{level * (blocks + 1) + place}"
            yield from _level(theirs, f"{ours}.resnets.{place}", f"{ours}.upsamplers.0")


def _level(theirs: str, resnet: str, resampler: str) -> Iterator[Rule]:
    """One entry of a list of levels, which is either."""
    yield from _resnet(theirs, resnet)
    yield Rule(f"{theirs}.resample.1.{{leaf}}", f"{resampler}.resample.1.{{leaf}}")
    yield Rule(f"{theirs}.time_conv.{{leaf}}", f"{resampler}.time_conv.{{leaf}}")


def _resnet(theirs: str, ours: str) -> Iterator[Rule]:
    for place, name in ((0, "norm1"), (2, "conv1"), (3, "norm2"), (6, "conv2")):
        yield Rule(f"{theirs}.residual.{place}.{{leaf}}", f"{ours}.{name}.{{leaf}}")
    yield Rule(f"{theirs}.shortcut.{{leaf}}", f"{ours}.conv_shortcut.{{leaf}}")
