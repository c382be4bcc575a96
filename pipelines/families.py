"""The families that picture models are loaded as: one line each."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import flux, flux2, flux_kontext, hunyuan_video, ltx, qwen_image, qwen_image_edit, sd, sd3, sdxl, wan, z_image
from .folders import pipeline_class
from .image import ImagePipeline
from .other_classes import needs
from .parts import Layout, Parts


@dataclass(frozen=True, kw_only=True)
class FolderFamily:
    """A family by the name that users know it by, where its parts are, and what loads them. `word` is in the names of
    its files, where nothing in them tells them from another family's."""

    title: str
    layout: Layout
    load: Callable[[Parts], ImagePipeline]
    word: str | None = None


FAMILIES = (
    FolderFamily(title="FLUX.1", layout=flux.LAYOUT, load=flux.load_flux),
    FolderFamily(  # from folders, or by `family`: a file with its names is taken to be FLUX.1's
        title="FLUX.1 Kontext", layout=flux_kontext.LAYOUT, load=flux_kontext.load_flux_kontext, word="kontext"
    ),
    FolderFamily(title="FLUX.2", layout=flux2.LAYOUT, load=flux2.load_flux2),
    FolderFamily(title="Stable Diffusion 3", layout=sd3.LAYOUT, load=sd3.load_sd3),
    FolderFamily(title="Z-Image", layout=z_image.LAYOUT, load=z_image.load_z_image),
    FolderFamily(  # before Qwen-Image, whose names its files hold too
        title="Qwen-Image-Edit-Plus",
        layout=qwen_image_edit.LAYOUT,
        load=qwen_image_edit.load_qwen_image_edit,
        word="edit",
    ),
    FolderFamily(title="Qwen-Image", layout=qwen_image.LAYOUT, load=qwen_image.load_qwen_image),
    FolderFamily(  # from folders, or by `family`: a file with its names is taken to be Qwen-Image's
        title="Qwen-Image-Edit",
        layout=qwen_image_edit.FIRST_LAYOUT,
        load=qwen_image_edit.load_first_qwen_image_edit,
        word="edit",
    ),
    FolderFamily(title="Stable Diffusion 1 or 2", layout=sd.LAYOUT, load=sd.load_sd),
    FolderFamily(title="Stable Diffusion XL", layout=sdxl.LAYOUT, load=sdxl.load_sdxl),
    FolderFamily(title="HunyuanVideo 1.5", layout=hunyuan_video.LAYOUT, load=hunyuan_video.load_hunyuan_video),
    FolderFamily(title="Wan", layout=wan.LAYOUT, load=wan.load_wan),
    FolderFamily(title="LTX-Video", layout=ltx.LAYOUT, load=ltx.load_ltx),
)


def family_of_class(name: str) -> FolderFamily | None:
    """The family whose pipelines include the diffusers class `name`."""
    return next((family for family in FAMILIES if name in family.layout.classes), None)


def family_of_folder(folder: Path) -> FolderFamily:
    """The family of a folder in diffusers' layout.

    Raises:
        ValueError: it was saved from a pipeline of another one.
    """
    name = pipeline_class(folder)
    family = family_of_class(name)
    if family is None:
        what = f"a diffusers folder of {name}{needs(name)}"
        raise ValueError(f"cannot load {str(folder)!r}, {what}; supported today are {titles()}")
    return family


def family_named(title: str) -> FolderFamily:
    """The family of this title, in capitals or not, with any signs between its words. ValueError if there is none."""
    found = next((family for family in FAMILIES if _words(family.title) == _words(title)), None)
    if found is None:
        raise ValueError(f"family is {title!r}; it must be one of {titles()}")
    return found


def alike(family: FolderFamily) -> tuple[FolderFamily, ...]:
    """Other families that a file with this one's names may be of: nothing in it tells."""
    return tuple(each for each in FAMILIES if each is not family and family.layout.marks.within(each.layout.marks))


def _words(title: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", title.lower())


def titles() -> str:
    """All families, for messages."""
    return ", ".join(family.title for family in FAMILIES)
