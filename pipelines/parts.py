"""What a family of models is loaded from: where each part lies, and where it goes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..core.attention.base import AttentionSelector
from .folders import component


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a family's parts are in a folder of diffusers' layout, whose model_index.json names one of `classes`.

    `encoders` and `tokenizers` are folders by role; those in `optional` may be missing.
    """

    classes: tuple[str, ...]
    encoders: Mapping[str, str]
    tokenizers: Mapping[str, str]
    denoiser: str = "transformer"
    vae: str = "vae"
    scheduler: str = "scheduler"
    optional: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of one model. `name` is what loads it again; `folder` is the diffusers folder that it lies in.

    `denoiser` is a folder with its config.json and weights, or one file of weights; `scheduler` is None where there is
    no config of it. Weights go to `device` in `dtype`.
    """

    name: str
    folder: Path | None
    denoiser: Path
    vae: Path
    scheduler: Path | None
    device: torch.device
    dtype: torch.dtype
    attention: AttentionSelector
    encoders: Mapping[str, Path] = field(default_factory=dict[str, Path])
    tokenizers: Mapping[str, Path] = field(default_factory=dict[str, Path])


def parts_of_folder(
    folder: Path,
    layout: Layout,
    *,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    attention: AttentionSelector,
) -> Parts:
    """The parts of a folder in diffusers' layout.

    Raises:
        FileNotFoundError: one is missing.
    """
    return Parts(
        name=name,
        folder=folder,
        denoiser=component(folder, layout.denoiser),
        encoders=_folders(folder, layout.encoders, layout.optional),
        tokenizers=_folders(folder, layout.tokenizers, layout.optional),
        vae=component(folder, layout.vae),
        scheduler=component(folder, layout.scheduler),
        device=device,
        dtype=dtype,
        attention=attention,
    )


def _folders(folder: Path, names: Mapping[str, str], optional: frozenset[str]) -> dict[str, Path]:
    wanted = {role: name for role, name in names.items() if name not in optional or (folder / name).is_dir()}
    return {role: component(folder, name) for role, name in wanted.items()}
