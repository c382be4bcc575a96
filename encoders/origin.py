"""Where text encoders were loaded from, and what is saved of them: the weights that they hold now, and those of the
same files that reading prompts takes no part in (a head, later blocks), so that other programs find a whole model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, cast, runtime_checkable

import torch

from ..core.checkpoint import Files, resolve_files
from ..core.saving import Component, Held, Weight, stored_again
from ..language.checkpoints import ModelSource, StoredModel, model_weights, read_entries
from .base import TextEncoder

_GENERATION = "generation_config.json"
_DTYPES = ("dtype", "torch_dtype")
_NOT_SETTINGS = ("model", "language_model", "vision", "tokenizer", "stored", "origin")


@dataclass(frozen=True, kw_only=True)
class TextComponent(Component):
    """A text encoder's folder, and the one that its tokenizer was read from, as transformers' `tokenizer_class`.
    `others` are files of its own that are copied."""

    tokenizer: Path
    tokenizer_class: str
    others: tuple[Path, ...] = ()


@runtime_checkable
class SaveableEncoder(Protocol):
    """A text encoder that knows how it is saved."""

    def component(self) -> TextComponent:
        """What its folder holds. Nothing is read yet.

        Raises:
            FileNotFoundError, ValueError: it cannot be saved; the message says why.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class TextOrigin:
    """What a text encoder was loaded from; `read` is the tokenizer that was in its folder, `stamps` are the size and
    time of each file of weights."""

    model: ModelSource
    tokenizer: Path
    variant: str | None
    read: object
    stamps: Mapping[Path, tuple[int, int]]

    @classmethod
    def of(cls, model: ModelSource, tokenizer: str | Path, variant: str | None, read: object) -> Self:
        """That of an encoder which has just been loaded."""
        stamps = _stamps(model_weights(model, variant))
        return cls(model=model, tokenizer=Path(tokenizer), variant=variant, read=read, stamps=stamps)

    def component(self, tokenizer: object, held: tuple[Held, ...]) -> TextComponent:
        """The component of an encoder with this tokenizer and these modules.

        Raises:
            FileNotFoundError, ValueError: what it was loaded from is not there any more, has changed, or does not fit.
        """
        return self._component(tokenizer, stored_again(self.files(tokenizer), held), held[0].dtype)

    def whole_component(self, tokenizer: object, held: Held) -> TextComponent:
        """The same, of a module of transformers that holds all weights. Those of a file, which may have other names,
        are saved by the module's."""
        if not isinstance(self.model, StoredModel):
            return self.component(tokenizer, (held,))
        self.files(tokenizer)  # refuses what has changed since
        return self._component(tokenizer, held.weights(), held.dtype)

    def files(self, tokenizer: object) -> Files:
        """What holds the weights. Errors as for `component`."""
        files = model_weights(self.model, self.variant)
        if tokenizer is not self.read:
            raise ValueError(f"its tokenizer is not the one of {self.tokenizer}, and would be lost")
        if _stamps(files) != self.stamps:
            raise ValueError(f"{self.model} has changed since it was loaded")
        return files

    def _component(self, tokenizer: object, weights: Mapping[str, Weight], dtype: torch.dtype) -> TextComponent:
        others = () if isinstance(self.model, StoredModel) else (self.model / _GENERATION,)
        return TextComponent(
            entries=_in_dtype(read_entries(self.model), dtype),
            weights=weights,
            tokenizer=self.tokenizer,
            tokenizer_class=type(tokenizer).__name__,
            others=tuple(path for path in others if path.is_file()),
        )


def required_origin(encoder: TextEncoder, origin: TextOrigin | None) -> TextOrigin:
    """The origin of an encoder that is to be saved. ValueError where it has none."""
    if origin is None:
        raise ValueError(f"this {type(encoder).__name__} was not loaded from files, so there is no config to save")
    return origin


def settings_of(encoder: TextEncoder) -> dict[str, object]:
    """How an encoder reads prompts, by name: what its files do not say."""
    found: dict[str, object] = {}
    for name, value in cast(dict[str, object], vars(encoder)).items():
        if name not in _NOT_SETTINGS:
            found |= settings_of(value) if isinstance(value, TextEncoder) else {name: value}
    return {**found, "kind": type(encoder).__name__}


def _stamps(files: Files) -> dict[Path, tuple[int, int]]:
    found = {file: file.stat() for file in resolve_files(files)}
    return {file: (stat.st_size, stat.st_mtime_ns) for file, stat in found.items()}


def _in_dtype(entries: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A config whose entries of a dtype, where it has such, say this one."""
    changed = dict[str, Any](entries)
    for name, value in entries.items():
        if name in _DTYPES and value is not None:
            changed[name] = str(dtype).removeprefix("torch.")
        elif isinstance(value, Mapping):
            changed[name] = _in_dtype(cast(Mapping[str, Any], value), dtype)
    return changed
