"""The parts that a user gives beside a source: folders, files, hub ids, or parts that are loaded already."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, cast

from ..encoders.base import TextEncoder
from ..vae.base import Autoencoder
from .parts import Layout

PartSource: TypeAlias = str | Path
EncoderSources: TypeAlias = PartSource | Mapping[str, PartSource | TextEncoder]
TokenizerSources: TypeAlias = PartSource | Mapping[str, PartSource]
_PATHS = (str, Path)


@dataclass(frozen=True, kw_only=True)
class Given:
    """As `calotype.load` takes them; None where the source has the part. `family` says what the source is, where
    nothing in it tells.

    Raises:
        ValueError: something that is no part.
    """

    denoiser: PartSource | None = None
    encoders: EncoderSources | None = None
    tokenizers: TokenizerSources | None = None
    vae: PartSource | Autoencoder | None = None
    family: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(cast(object, self.family), str | None):
            raise ValueError(f"family is of type {type(self.family).__name__}; it must be a name")
        if not isinstance(cast(object, self.denoiser), (*_PATHS, type(None))):
            raise ValueError(
                f"denoiser is of type {type(self.denoiser).__name__}; it must be a file, a folder or a hub id (a "
                "module that is loaded goes into a pipeline by dataclasses.replace(pipe, denoiser=...))"
            )
        if not isinstance(cast(object, self.vae), (*_PATHS, Autoencoder, type(None))):
            kinds = "a file, a folder, a hub id or an autoencoder"
            raise ValueError(f"vae is of type {type(self.vae).__name__}; it must be {kinds}")
        _check_roles("encoders", self.encoders, (*_PATHS, TextEncoder))
        _check_roles("tokenizers", self.tokenizers, _PATHS)

    def of_roles(self, layout: Layout, title: str) -> "tuple[EncodersByRole, TokenizersByRole]":
        """Encoders and tokenizers by their roles: one for all of them is given to each.

        Raises:
            ValueError: a role that the family does not have.
        """
        encoders = _by_role("encoders", self.encoders, layout, title)
        tokenizers = _by_role("tokenizers", self.tokenizers, layout, title)
        return encoders, cast(TokenizersByRole, tokenizers)

    def covered(self, layout: Layout) -> frozenset[str]:
        """The folders of components that the source need not have."""
        found: set[str] = set()
        if self.denoiser is not None:
            found.add(layout.denoiser)
        if self.vae is not None:
            found.add(layout.vae)
        for given, folders in ((self.encoders, layout.encoders), (self.tokenizers, layout.tokenizers)):
            if given is not None:
                roles = given if isinstance(given, Mapping) else folders
                found |= {folders[role] for role in roles if role in folders}
        return frozenset(found)

    def needed(self, layout: Layout) -> list[str]:
        """The folders of components that the source must have."""
        covered = self.covered(layout)
        return [name for name in layout.folders if name not in covered]

    @property
    def keywords(self) -> tuple[str, ...]:
        """The names of those that are given."""
        return tuple(name for name, value in vars(self).items() if value is not None)


EncodersByRole: TypeAlias = Mapping[str, PartSource | TextEncoder]
TokenizersByRole: TypeAlias = Mapping[str, PartSource]


def _by_role(keyword: str, given: EncoderSources | None, layout: Layout, title: str) -> EncodersByRole:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        return dict.fromkeys(layout.encoders, given)
    for role in given:
        if role not in layout.encoders:
            roles = ", ".join(repr(role) for role in layout.encoders)
            raise ValueError(f"{keyword}: {title} has no text encoder {role!r}; it has {roles}")
    return given


def _check_roles(keyword: str, given: object, kinds: tuple[type, ...]) -> None:
    values = cast(Mapping[object, object], given).values() if isinstance(given, Mapping) else (given,)
    allowed = kinds if isinstance(given, Mapping) else (*_PATHS, type(None))
    for value in values:
        if not isinstance(value, allowed):
            loaded = "" if TextEncoder not in kinds else ", or encoders that are loaded"
            wanted = f"a folder or a hub id, or a mapping of such by their roles{loaded}"
            raise ValueError(f"{keyword} holds a {type(value).__name__}; it must be {wanted}")
