"""What a family of models is loaded from: where each part lies, and where it goes."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch

from ..core.attention.base import AttentionSelector
from ..core.checkpoint import Files, part_of, resolve_files
from ..core.component_files import has_variant, refuse_quantised, weights_files
from ..core.naming import naming
from ..core.shapes import Shapes
from ..denoisers.shapes import PREFIXES, Marks
from ..encoders.base import TextEncoder
from ..encoders.in_files import Inside
from ..language.checkpoints import ModelSource, StoredModel
from ..vae.base import Autoencoder
from ..vae.kl_keys import PREFIXES as AUTOENCODER_PREFIXES
from .folders import CONFIG, INDEX, SCHEDULER_CONFIG, entries_of, weights_digests

_C = TypeVar("_C")
NOTHING = frozenset[str]()
_A = TypeVar("_A", bound=Autoencoder)
_A_co = TypeVar("_A_co", bound=Autoencoder, covariant=True)

Offload = Literal["none", "encoders", "blocks"]
"""Which weights stay in their files until they are used: none, those of the text encoders, those of the denoiser's
blocks as well."""
META = torch.device("meta")


@dataclass(frozen=True, kw_only=True)
class ClipSize:
    """What a family's clip has whose size is not given: pixels, frames, of which `group` are a latent frame after the
    first, and tokens of `side` x `side` pixels."""

    width: int
    height: int
    frames: int
    group: int
    side: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a family's parts are in a folder of diffusers' layout, whose model_index.json names one of `classes`.

    `encoders` and `tokenizers` are folders by role; those in `optional` may be missing. `marks` tell a file that holds
    the denoiser, alone or with other parts; `inside` are the encoders that such a file may hold, by role. `processors`
    are transformers' classes, by role, of tokenizers' folders that say how pictures are read as well; diffusers looks
    for the tokenizer alone beside them. `second` is that of a second denoiser, `pictures` are those of a picture
    encoder and its processor, all of which may be missing. `needed` are folders that a denoiser with such tensors does
    not do without, of those that may be missing. `configs` are folders that hold one file of options, with its name,
    and may be missing. `inpainting` is the class of models that read a mask. `side`: pixels of a picture whose size is
    not given; `clip`: what a denoiser with such tensors makes then, where it makes clips.
    """

    classes: tuple[str, ...]
    encoders: Mapping[str, str]
    tokenizers: Mapping[str, str]
    denoiser: str = "transformer"
    vae: str = "vae"
    scheduler: str = "scheduler"
    optional: frozenset[str] = frozenset()
    marks: Marks = Marks()  # noqa: RUF009 (immutable)
    inside: Mapping[str, tuple[Inside, ...]] = field(default_factory=dict[str, tuple[Inside, ...]])
    processors: Mapping[str, str] = field(default_factory=dict[str, str])
    second: str | None = None
    pictures: tuple[str, str] | None = None
    needed: Callable[[Shapes], frozenset[str]] = lambda shapes: NOTHING
    configs: Mapping[str, str] = field(default_factory=dict[str, str])
    inpainting: str | None = None
    side: int = 1024
    clip: Callable[[Shapes], ClipSize] | None = None

    @property
    def others(self) -> tuple[str, ...]:
        """Folders of further networks."""
        second = () if self.second is None else (self.second,)
        return second if self.pictures is None else (*second, self.pictures[0])

    @property
    def folders(self) -> tuple[str, ...]:
        """All that a model may have."""
        texts = (*self.encoders.values(), *self.tokenizers.values())
        others = (*self.others, *(self.pictures or ())[1:], *self.configs)
        return (self.denoiser, *texts, self.vae, self.scheduler, *others)

    @property
    def may_lack(self) -> frozenset[str]:
        """Folders that a model need not have."""
        return self.optional.union(self.others, self.pictures or (), self.configs)

    @property
    def needed_encoders(self) -> tuple[str, ...]:
        """The roles of those that may not be missing."""
        return tuple(role for role, folder in self.encoders.items() if folder not in self.optional)


class FolderLoader(Protocol[_A_co]):
    """What makes an autoencoder of its folder."""

    def __call__(self, folder: Path, /, *, variant: str | None, device: torch.device, dtype: torch.dtype) -> _A_co:
        """The autoencoder."""
        ...


class FileLoader(Protocol[_A_co]):
    """What makes an autoencoder of a single file."""

    def __call__(self, files: Files, /, *, device: torch.device, dtype: torch.dtype) -> _A_co:
        """The autoencoder."""
        ...


class EncoderLoader(Protocol):
    """What makes a text encoder of its folder, or of a file that holds it, and its tokenizer's folder."""

    def __call__(
        self, model: ModelSource, tokenizer: Path, /, *, variant: str | None, device: torch.device, dtype: torch.dtype
    ) -> TextEncoder:
        """The encoder."""
        ...


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where the parts of one model lie. `folder` is the one in diffusers' layout that it was loaded from, if any.

    `denoiser` is a folder with its config.json and weights, or a file that holds it, maybe beside other parts; `vae` as
    well, which may be the same file. The autoencoder and text encoders may be there already. `scheduler` is None where
    there is no config of it. `others` are further networks, by the names of their folders. `variant` picks files where
    a part has several.
    """

    folder: Path | None
    denoiser: Path
    vae: Path | Autoencoder
    scheduler: Path | None
    encoders: Mapping[str, ModelSource | TextEncoder] = field(default_factory=dict[str, ModelSource | TextEncoder])
    tokenizers: Mapping[str, Path] = field(default_factory=dict[str, Path])
    others: Mapping[str, Path] = field(default_factory=dict[str, Path])
    variant: str | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """The folders and files of parts that are not loaded already."""
        return places_of((self.denoiser, self.vae, *self.encoders.values(), *self.others.values()))

    @property
    def denoiser_files(self) -> Files:
        """What holds the denoiser's weights."""
        return part_of(weights_files(self.denoiser, self.variant), PREFIXES)

    def denoiser_config(
        self, from_entries: Callable[[Mapping[str, Any]], _C], from_shapes: Callable[[Shapes], _C]
    ) -> _C:
        """The denoiser's config, from its config.json or, of a single file, from the shapes of its tensors.

        Raises:
            FileNotFoundError, ValueError: there is none, or it makes no sense here.
        """
        if self.denoiser.is_dir():
            refuse_quantised(self.denoiser)
            return from_entries(entries_of(self.denoiser / CONFIG))
        shapes = Shapes.read(self.denoiser_files)
        with naming(self.denoiser):
            return from_shapes(shapes)

    def scheduler_config(self, from_entries: Callable[[Mapping[str, Any]], _C], preset: _C) -> _C:
        """The scheduler's config, from its file where there is one."""
        return preset if self.scheduler is None else from_entries(entries_of(self.scheduler / SCHEDULER_CONFIG))

    def config_entries(self, name: str, layout: Layout) -> Mapping[str, Any] | None:
        """The entries of one of the layout's `configs`; None where there is none."""
        file = None if self.folder is None else self.folder / name / layout.configs[name]
        return None if file is None or not file.is_file() else entries_of(file)

    def index_entries(self) -> Mapping[str, Any]:
        """The entries of the model_index.json; none where there is no such file."""
        return {} if self.folder is None else entries_of(self.folder / INDEX)

    def digests(self, layout: Layout) -> dict[str, str]:
        """A digest of each weights file, by its component's name in `layout` and its own."""
        return weights_digests({name: resolve_files(files) for name, files in self.weights(layout).items()})

    def weights(self, layout: Layout) -> dict[str, Files]:
        """What holds the weights of each component that is not loaded already, maybe beside others, by its name in
        `layout`."""
        encoders = {layout.encoders[role]: part for role, part in self.encoders.items()}
        parts = {layout.denoiser: self.denoiser, layout.vae: self.vae, **encoders, **self.others}
        paths = {name: path for name, part in parts.items() if (path := place_of(part)) is not None}
        return {name: weights_files(path, self.variant) for name, path in paths.items()}


@dataclass(frozen=True, kw_only=True)
class Parts(Places):
    """The parts of one model and where they go. `name` is what loads it again.

    Weights go to `device` in `dtype`, but for those that stay in their files (`offload`).
    """

    name: str
    device: torch.device
    dtype: torch.dtype
    attention: AttentionSelector
    offload: Offload = "none"

    def autoencoder(
        self, from_folder: FolderLoader[_A], from_file: FileLoader[_A], *, channels: int
    ) -> _A | Autoencoder:
        """The autoencoder that is there, or what one of these makes of its folder or file.

        Raises:
            ValueError: its latents are not of `channels`, or it does not load.
        """
        if not isinstance(self.vae, Path):
            vae = self.vae
        elif self.vae.is_dir():
            vae = from_folder(self.vae, variant=self.variant_of(self.vae), device=self.device, dtype=self.dtype)
        else:
            vae = self._autoencoder_of_file(self.vae, from_file)
        if vae.latent_channels != channels:
            raise ValueError(
                f"the autoencoder's latents have {vae.latent_channels} channels; the denoiser's {channels}"
            )
        return vae

    def _autoencoder_of_file(self, file: Path, load: FileLoader[_A]) -> _A:
        files = part_of(weights_files(file), AUTOENCODER_PREFIXES)
        try:
            return load(files, device=self.device, dtype=self.dtype)
        except ValueError as error:
            if str(file) in str(error):
                raise
            raise ValueError(f"vae: {file}: {error}") from None

    def encoder(self, role: str, load: EncoderLoader) -> TextEncoder:
        """The text encoder that is there for a role, or what `load` makes of its folders or file."""
        part = self.encoders[role]
        if not isinstance(part, ModelSource):
            return part
        variant = self.variant_of(part) if isinstance(part, Path) else None
        return load(part, self.tokenizers[role], variant=variant, device=self.encoder_device, dtype=self.dtype)

    def variant_of(self, folder: Path) -> str | None:
        """The variant that is asked for, where the folder's weights come in it."""
        return self.variant if self.variant is not None and has_variant(folder, self.variant) else None

    @property
    def encoder_device(self) -> torch.device:
        """Where the weights of text encoders go."""
        return self.device if self.offload == "none" else META

    @property
    def block_device(self) -> torch.device:
        """Where the weights of the denoiser's blocks go."""
        return META if self.offload == "blocks" else self.device


def places_of(parts: Iterable[object]) -> tuple[Path, ...]:
    """The folders and files that parts lie in, but for those that are loaded already."""
    return tuple(path for part in parts if (path := place_of(part)) is not None)


def place_of(part: object) -> Path | None:
    """The folder or file that a part lies in; None for one that is loaded already."""
    if isinstance(part, StoredModel):
        return part.file
    return part if isinstance(part, Path) else None
