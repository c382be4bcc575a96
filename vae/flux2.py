"""The picture autoencoder of FLUX.2: diffusers' `AutoencoderKLFlux2` behind our interface.

Its latents are those of a KL autoencoder, 2x2 cells with all their channels made one, and normalised by statistics that
were counted in training.

Legend: B rows, C latent channels (four times the raw ones), H W pixels, h w latent cells (half the raw ones a side).
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.checkpoint import Files
from ..core.component_files import component_weights
from ..core.copies import moved
from ..core.diffusers_config import POSITIVE, SIZES, checked, read_config
from ..core.key_map import KeyMap, Layout, Rule
from ..core.loading import build_on_meta, load_weights
from ..core.saving import Component, Weight
from ..core.shapes import Shapes
from .kl import KLAutoencoder
from .kl_config import CLASS_NAME, KLConfig, kl_config
from .kl_keys import kl_key_map
from .kl_shapes import PREFIXES, sized_kl_config
from .latent_space import Standardised
from .loading import module_on_meta
from .tiling import Tiling

PATCH = 2
FLUX2_CLASS = "AutoencoderKLFlux2"
_NOT_TAKEN = ("scaling_factor", "shift_factor", "latents_mean", "latents_std", "force_upcast")
_OWN = {"batch_norm_eps": POSITIVE, "decoder_block_out_channels": SIZES}


@dataclass(frozen=True, kw_only=True)
class Flux2KLConfig:
    """`kl` are the sizes of encoder and decoder, `decoder_channels` the decoder's own where they differ; latents are
    (z - mean) / sqrt(variance + norm_eps)."""

    kl: KLConfig = KLConfig(  # noqa: RUF009 (immutable)
        block_out_channels=(128, 256, 512, 512), layers_per_block=2, latent_channels=32, scaling_factor=1.0
    )
    norm_eps: float = 1e-4
    decoder_channels: tuple[int, ...] | None = None

    @classmethod
    def from_entries(cls, entries: Mapping[str, object]) -> "Flux2KLConfig":
        """The config that the entries of a config.json say; what is missing has diffusers' default.

        Raises:
            ValueError: of another class, or an entry that is not known, of another type, or not supported.
        """
        if entries.get("_class_name") != FLUX2_CLASS:
            raise ValueError(f"the config's _class_name is {entries.get('_class_name')!r}; this one is {FLUX2_CLASS!r}")
        if entries.get("patch_size", [PATCH, PATCH]) != [PATCH, PATCH]:
            raise ValueError(
                f"the config's patch_size is {entries['patch_size']!r}; only {[PATCH, PATCH]} is supported"
            )
        own = {name: checked(name, entries[name], _OWN) for name in _OWN if entries.get(name) is not None}
        skipped = (*_OWN, "patch_size", "batch_norm_momentum", "_class_name")
        default = cls()
        rest = {name: value for name, value in entries.items() if name not in skipped}
        usual = default.kl.entries().items()
        listed = {name: list(value) if isinstance(value, tuple) else value for name, value in usual}
        return cls(
            kl=kl_config({**listed, **rest, "_class_name": CLASS_NAME}),
            norm_eps=cast(float, own.get("batch_norm_eps", default.norm_eps)),
            decoder_channels=cast("tuple[int, ...] | None", own.get("decoder_block_out_channels")),
        )

    def entries(self) -> dict[str, Any]:
        """The arguments of diffusers' class."""
        sizes = {name: value for name, value in self.kl.entries().items() if name not in _NOT_TAKEN}
        return {**sizes, "decoder_block_out_channels": self.decoder_channels}


@dataclass(frozen=True, kw_only=True, eq=False)
class Flux2Autoencoder:
    """Maps pictures in -1..1 to normalised latents and back; see `KLAutoencoder`, whose options hold. `mean` and
    `variance` [C] are float32 whatever the dtype of the weights."""

    kl: KLAutoencoder
    mean: Tensor
    variance: Tensor
    norm_eps: float

    def moved(self, device: torch.device, dtype: torch.dtype | None) -> "Flux2Autoencoder":
        """A copy elsewhere."""
        kl = moved(self.kl, device, dtype)
        return dataclasses.replace(self, kl=kl, mean=self.mean.to(device), variance=self.variance.to(device))

    @property
    def std(self) -> Tensor:
        """What latents are divided by, [C] float32."""
        return torch.sqrt(self.variance + self.norm_eps)

    @property
    def config(self) -> tuple[KLConfig, float]:
        """The sizes of encoder and decoder, and what is added to the variance."""
        return self.kl.config, self.norm_eps

    def component(self) -> Component:
        """See `Saveable`; the number of batches that the statistics were counted in, which nothing reads, is 0."""
        kl = self.kl.component()
        counted = {"running_mean": self.mean, "running_var": self.variance, "num_batches_tracked": torch.tensor(0)}
        weights = {
            f"bn.{name}": Weight(shape=tuple(x.shape), dtype=x.dtype, read=x.clone) for name, x in counted.items()
        }
        return Component(entries={**kl.entries, "batch_norm_eps": self.norm_eps}, weights={**kl.weights, **weights})

    @property
    def latent_channels(self) -> int:
        """C."""
        return self.kl.latent_channels * PATCH**2

    @property
    def downsampling(self) -> int:
        """Pixels a side per latent cell."""
        return self.kl.downsampling * PATCH

    def encode(self, pixels: Tensor, noise: Tensor | None = None) -> Tensor:
        """Latents [B, C, 1, h, w] of pixels [B, 3, 1, H, W]: the posterior's mean, or mean + std * `noise`.

        Raises:
            ValueError: pixels or noise of another shape, or sides that are no multiple of the downsampling.
        """
        for side, length in zip(("height", "width"), pixels.shape[3:], strict=False):
            if length % self.downsampling:
                raise ValueError(f"the {side} is {length} pixels; it must be a multiple of {self.downsampling}")
        raw = self.kl.encode(pixels, None if noise is None else _spread(noise))
        return self._space().normalised(_joined(raw))

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, 1, H, W], about -1..1, of latents [B, C, 1, h, w]. Raises ValueError for another shape."""
        if latents.ndim != 5 or latents.shape[1] != self.latent_channels or latents.shape[2] != 1:
            raise ValueError(
                f"latents have shape {list(latents.shape)}; it must be [rows, {self.latent_channels}, 1, height, width]"
            )
        return self.kl.decode(_spread(self._space().raw(latents)))

    def _space(self) -> Standardised:
        return Standardised(mean=self.mean.view(1, -1, 1, 1, 1), std=self.std.view(1, -1, 1, 1, 1))


def load_flux2_kl(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    variant: str | None = None,
    tiling: Tiling | None = None,
    slicing: bool = False,
) -> Flux2Autoencoder:
    """The autoencoder of a folder in diffusers' layout; everything is checked before anything is allocated.

    Raises:
        FileNotFoundError: a file is missing. ValueError: the config is of another class or makes no sense, or the
        weights are damaged, pickled, or do not fit the config.
    """
    folder = Path(folder)
    config = read_config(folder, "an autoencoder", Flux2KLConfig.from_entries)
    files = component_weights(folder, variant)
    return _loaded(files, config, device=device, dtype=dtype, tiling=tiling, slicing=slicing)


def load_flux2_kl_file(
    files: Files, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Flux2Autoencoder:
    """The autoencoder of a file in Black Forest Labs' layout or diffusers', of the sizes that it shows. Errors as for
    `load_flux2_kl`."""
    shapes = Shapes.read(files, PREFIXES)
    inside = {
        "encoder.quant_conv.weight": "quant_conv.weight",
        "decoder.post_quant_conv.weight": "post_quant_conv.weight",
    }
    plain = Shapes({inside.get(name, name): shape for name, shape in shapes.shapes.items()})
    config = Flux2KLConfig(kl=sized_kl_config(Flux2KLConfig().kl, plain), decoder_channels=_decoder_channels(plain))
    return _loaded(files, config, device=device, dtype=dtype, tiling=None, slicing=False)


def _decoder_channels(shapes: Shapes) -> tuple[int, ...]:
    """The widths of the decoder's levels, from the picture's to the latents'."""
    levels = shapes.count("decoder.up.", "decoder.up_blocks.")
    original = shapes.has("decoder.up.0.block.0.conv2.weight")
    names = (
        f"decoder.up.{i}.block.0" if original else f"decoder.up_blocks.{levels - 1 - i}.resnets.0"
        for i in range(levels)
    )
    return tuple(shapes.of(f"{name}.conv2.weight", axes=4)[0] for name in names)


def _loaded(
    files: Files,
    config: Flux2KLConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    tiling: Tiling | None,
    slicing: bool,
) -> Flux2Autoencoder:
    module = _build(config)
    counted = build_on_meta(lambda: _Statistics(config.kl.latent_channels * PATCH**2))
    load_weights(module, files, _key_map(len(config.kl.block_out_channels)), dtype=dtype, device=device)
    load_weights(counted, files, _statistics_map(), dtype=torch.float32, device=device)
    module.requires_grad_(False).eval()
    return Flux2Autoencoder(
        kl=KLAutoencoder(module=module, config=config.kl, tiling=tiling, slicing=slicing),
        mean=counted.running_mean,
        variance=counted.running_var,
        norm_eps=config.norm_eps,
    )


class _Statistics(nn.Module):
    """What a checkpoint says of raw latents."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))


def _build(config: Flux2KLConfig) -> nn.Module:
    """diffusers' module on the meta device, without its statistics. Raises ValueError for sizes that make none."""
    from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2

    module = module_on_meta(FLUX2_CLASS, AutoencoderKLFlux2, config.entries())
    module.register_module("bn", nn.Identity())
    return module


def _key_map(levels: int) -> KeyMap:
    """That of `AutoencoderKL`, and 1x1 convolutions inside the halves, where Black Forest Labs have them."""
    inside = (
        Rule("encoder.quant_conv.{leaf}", "quant_conv.{leaf}"),
        Rule("decoder.post_quant_conv.{leaf}", "post_quant_conv.{leaf}"),
    )
    return KeyMap(
        tuple(
            dataclasses.replace(layout, rules=(*layout.rules, *inside), drops=(*layout.drops, "bn.{leaf}"))
            for layout in kl_key_map(levels).layouts
        )
    )


def _statistics_map() -> KeyMap:
    rules = tuple(Rule(f"bn.{name}", name) for name in ("running_mean", "running_var"))
    return KeyMap((Layout("diffusers", rules, drops=("{any*}",), prefixes=("", *PREFIXES)),))


def _joined(raw: Tensor) -> Tensor:
    """[B, C / 4, 1, 2 h, 2 w] to [B, C, 1, h, w], channel-major."""
    return functional.pixel_unshuffle(raw[:, :, 0], PATCH)[:, :, None]


def _spread(latents: Tensor) -> Tensor:
    """The inverse of `_joined`."""
    return functional.pixel_shuffle(latents[:, :, 0], PATCH)[:, :, None]
