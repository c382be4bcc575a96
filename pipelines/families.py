"""The families that diffusers folders are loaded as: one line each."""

from collections.abc import Callable
from dataclasses import dataclass

from . import flux
from .image import ImagePipeline
from .parts import Layout, Parts


@dataclass(frozen=True, kw_only=True)
class FolderFamily:
    """A family by the name that users know it by, where its parts are, and what loads them."""

    title: str
    layout: Layout
    load: Callable[[Parts], ImagePipeline]


FAMILIES = (FolderFamily(title="FLUX.1", layout=flux.LAYOUT, load=flux.load_flux),)


def family_of_class(name: str) -> FolderFamily | None:
    """The family whose pipelines include the diffusers class `name`."""
    return next((family for family in FAMILIES if name in family.layout.classes), None)


def titles() -> str:
    """All families, for messages."""
    return ", ".join(family.title for family in FAMILIES)
