"""Pairs of a denoiser of ours and diffusers' with the same weights, and checks that each family's pair passes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from parity import slopes
from torch import Tensor

from calotype.core.attention.registry import attention_selector
from calotype.core.key_map import KeyMap
from calotype.core.loading import build_on_meta, load_weights
from calotype.core.weight_source import WeightSource
from calotype.denoisers.base import Conditioning
from calotype.denoisers.hoisting import HoistingModule
from calotype.denoisers.shapes import PREFIXES, Marks, Shapes
from calotype.schedulers import flow_schedule

CPU = torch.device("cpu")


class Config(Protocol):
    """A denoiser's config, which is read from a config.json or from the shapes of a file's tensors."""

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> Any: ...

    @classmethod
    def from_shapes(cls, shapes: Shapes) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A family's denoiser: its class, its config's, and its files' layouts."""

    denoiser: type[HoistingModule]
    config: type[Config]
    key_map: KeyMap

    def on_meta(self, config: Any) -> Any:
        """A denoiser without weights."""
        return build_on_meta(lambda: self.denoiser(config))

    def read(self, file: Path, config: Any) -> Any:
        """A denoiser with a file's weights, all of them in memory."""
        model = self.on_meta(config)
        load_weights(model, file, self.key_map)
        return model.requires_grad_(False).eval()

    def pair(self, theirs: Any, folder: Path) -> "Pair":
        """diffusers' denoiser, saved to a folder, and ours of that."""
        theirs.save_pretrained(folder)
        file = folder / "diffusion_pytorch_model.safetensors"
        config = self.config.from_entries(dict(theirs.config))
        return Pair(kind=self, ours=self.read(file, config), theirs=theirs, file=file)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Ours and diffusers', with the same weights, and the file that holds these in diffusers' layout."""

    kind: Kind
    ours: Any
    theirs: Any
    file: Path

    def lean(self, dtype: torch.dtype = torch.float32) -> Any:
        """Ours as loading makes it of the file, which keeps what `prepare` alone reads."""
        model = self.kind.on_meta(self.ours.config)
        model.fill(WeightSource.for_module(model, self.file, self.kind.key_map), device=CPU, dtype=dtype)
        return model

    def check_file(self, file: Path) -> None:
        """Another file holds the same weights."""
        mine = self.ours.state_dict()
        other = self.kind.read(file, self.ours.config)
        assert all(torch.equal(weight, mine[name]) for name, weight in other.state_dict().items())

    def check_saved(self) -> None:
        """What is saved is what was loaded."""
        saved, stored = self.ours.component(), self.theirs.state_dict()
        assert self.kind.config.from_entries(saved.entries) == self.ours.config
        assert saved.weights.keys() == stored.keys()
        assert all(torch.equal(weight.read(), stored[name]) for name, weight in saved.weights.items())

    def check_lean(self, told: Conditioning, x: Tensor) -> None:
        """What only `prepare` reads may stay in the file."""
        lean, hoisted = self.lean(), self.kind.denoiser.hoisted
        absent = {name for name, parameter in lean.named_parameters() if parameter.is_meta}
        assert absent == {name for name, _ in self.ours.named_parameters() if name.startswith(hoisted)} != set()
        for one, other in zip(slopes(lean, told, x)[0], slopes(self.ours, told, x)[0], strict=True):
            assert torch.equal(one, other)

    def check_prepared_beside(self, told: Conditioning, other: Conditioning, x: Tensor) -> tuple[Any, Any]:
        """A second conditioning that shares what does not depend on it gives the slopes that it gives alone. What was
        prepared for the first, and for the second beside it."""
        points, shape = flow_schedule(2).points[:-1], tuple(x.shape)
        first = self.ours.prepare(told, shape, points, attention=attention_selector())
        second = self.ours.prepare_beside(first, other, shape)
        whole = self.ours.prepare(other, shape, points, attention=attention_selector())
        assert all(torch.equal(self.ours.slope(x, second, p), self.ours.slope(x, whole, p)) for p in points)
        return first, second


def clip_noise(rows: int, clip: tuple[int, tuple[int, int]], seed: int = 1) -> Tensor:
    """Standard normal latents of 4 channels, of clips of so many frames and cells."""
    frames, size = clip
    return torch.randn(rows, 4, frames, *size, generator=torch.Generator().manual_seed(seed))


def check_told_by_shapes(config: type[Config], marks: Marks, expected: Any, *layouts: Mapping[str, Tensor]) -> None:
    """The tensors of a file in each of the layouts show its family and its config."""
    for layout in layouts:
        shapes = Shapes({name: tuple(weight.shape) for name, weight in layout.items()}).within(*PREFIXES)
        assert marks.share(shapes.shapes) == 1
        assert config.from_shapes(shapes) == expected
