"""Autoencoders whose weights a module of diffusers holds, out of checkpoints and into folders.

They come out of a folder in diffusers' layout, or out of a file in any layout that is known.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import nn

from ..core.checkpoint import Files
from ..core.component_files import component_weights
from ..core.diffusers_config import made
from ..core.key_map import KeyMap
from ..core.loading import build_on_meta, load_weights
from ..core.naming import naming
from ..core.saving import Component, weights_of
from ..core.shapes import Shapes
from .tiling import Tiling

C = TypeVar("C")
A_co = TypeVar("A_co", covariant=True)
C_contra = TypeVar("C_contra", contravariant=True)
A = TypeVar("A")


class Wrapper(Protocol[C_contra, A_co]):
    """What makes an autoencoder of a module that holds its weights."""

    def __call__(self, *, module: nn.Module, config: C_contra, tiling: Tiling | None, slicing: bool) -> A_co:
        """The autoencoder."""
        ...


@dataclass(frozen=True, kw_only=True)
class Checkpoints(Generic[C, A]):
    """Checkpoints of one kind of autoencoder, and what is made of them.

    `config_of_folder` reads a config.json, `config_of_shapes` what the tensors of a file show, whose names may begin
    with one of `prefixes`. `build` makes diffusers' module of a config on the meta device, `key_map` says how weights
    go into it, and `wrap` puts our interface around it.
    """

    config_of_folder: Callable[[Path], C]
    config_of_shapes: Callable[[Shapes], C]
    prefixes: tuple[str, ...] = ()
    build: Callable[[C], nn.Module]
    key_map: Callable[[nn.Module, C], KeyMap]
    wrap: Wrapper[C, A]

    def load_folder(
        self,
        folder: str | Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        variant: str | None = None,
        tiling: Tiling | None = None,
        slicing: bool = False,
    ) -> A:
        """The autoencoder of a folder in diffusers' layout; arguments and errors as for `load_kl`."""
        folder = Path(folder)
        config = self.config_of_folder(folder)
        files = component_weights(folder, variant)
        with naming(folder / "config.json"):
            module = self.build(config)
        self._fill(module, config, files, device, dtype)
        return self.wrap(module=module, config=config, tiling=tiling, slicing=slicing)

    def load_file(
        self,
        files: Files,
        config: C | None = None,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        tiling: Tiling | None = None,
        slicing: bool = False,
    ) -> A:
        """The autoencoder of a file, alone or beside other networks; `config` None: of the sizes that it shows. Errors
        as for `load_kl`."""
        config = self.config_of_shapes(Shapes.read(files, self.prefixes)) if config is None else config
        module = self.build(config)
        self._fill(module, config, files, device, dtype)
        return self.wrap(module=module, config=config, tiling=tiling, slicing=slicing)

    def _fill(self, module: nn.Module, config: C, files: Files, device: torch.device | str, dtype: torch.dtype) -> None:
        load_weights(module, files, self.key_map(module, config), dtype=dtype, device=device)
        module.requires_grad_(False).eval()


def module_on_meta(name: str, build: Callable[..., nn.Module], entries: Mapping[str, Any]) -> nn.Module:
    """diffusers' class `name` without values, made by `build` of a config's entries. ValueError for sizes that make
    none."""
    return made(name, lambda: build_on_meta(lambda: build(**entries)))


def autoencoder_component(module: nn.Module, tiling: Tiling | None) -> Component:
    """The folder of an autoencoder of diffusers.

    Raises:
        ValueError: there is a tiling, which changes what is decoded and is in no file.
    """
    if tiling is not None:
        raise ValueError(f"its tiling is {tiling}, which a folder does not hold")
    return Component(entries=json.loads(cast(Any, module).to_json_string()), weights=weights_of(module))
