"""Folders and files of all families but the bundled model's, from a path to a pipeline."""

import dataclasses
import re
from pathlib import Path
from typing import get_args

import torch

from ..core.attention.base import AttentionSelector
from ..core.attention.registry import attention_selector
from ..core.component_files import weights_files
from ..core.copies import moved
from ..core.json_file import json_object
from ..core.naming import naming
from ..denoisers.unet import NO_BLOCKS
from ..language.checkpoints import ModelSource
from .families import FolderFamily, alike, family_named, family_of_folder, titles
from .finder import SINGLE, Finder
from .folders import CONFIG, is_diffusers
from .gather import Gathered, gather
from .given import Given
from .image import ImagePipeline
from .load import BUNDLED
from .origin import origin_of
from .parts import META, Offload, Parts
from .recognise import check_denoiser, recognise
from .variants import naming_variants

PICKLED = (".ckpt", ".pt", ".pth", ".bin", ".pkl")


def load_family(
    path: Path,
    name: str,
    given: Given,
    finder: Finder,
    *,
    device: torch.device,
    dtype: torch.dtype,
    attention: AttentionSelector,
    offload: str | None,
) -> ImagePipeline:
    """The pipeline of a folder or a file, which is called `name`. Arguments and errors as for `load`."""
    family = family_of(path, given)
    if given.family is None and not is_diffusers(path):
        _check_name(path, family)
    chosen = _offload(offload, family)
    places = gather(path, family, given, dataclasses.replace(finder, revision=None)).places()
    parts = Parts(**vars(places), name=name, device=device, dtype=dtype, attention=attention, offload=chosen)
    return _loaded(family, parts)


def refusal(path: Path, found: Gathered) -> str | None:
    """Why `load` would not take a source that lacks no part; None where it does.

    It is loaded on the meta device, as `load` would: of the weights the headers alone are read.
    """
    try:
        places = found.places()
        _loaded(
            found.family,
            Parts(**vars(places), name=str(path), device=META, dtype=torch.float32, attention=attention_selector(None)),
        )
    except (ValueError, FileNotFoundError) as error:
        return str(error)
    return None


def supported() -> str:
    """What can be loaded, for messages."""
    return (
        f"{BUNDLED!r} (the bundled model), folders that its pipe.save() wrote, folders in diffusers' layout and hub "
        f"ids of {titles()}, and .safetensors or .gguf files of their denoisers"
    )


def family_of(path: Path, given: Given) -> FolderFamily:
    """The family of a folder in diffusers' layout, or of a denoiser in a file or a component's folder.

    Raises:
        FileNotFoundError, ValueError: it has none, or cannot be told from it, or is not the one that is given.
    """
    asked = None if given.family is None else family_named(given.family)
    if is_diffusers(path):
        found = family_of_folder(path)
        if asked not in (None, found):
            raise ValueError(f"family is {given.family!r}; {path} says that it is {found.title}")
        return found
    _refuse_other_files(path)
    if given.denoiser is not None:
        raise ValueError(f"denoiser: {path} is one already; give a folder in diffusers' layout to replace its denoiser")
    if asked is not None:
        check_denoiser(path, None, asked)
        return asked
    with naming(f"cannot load {str(path)!r}"):
        return recognise(weights_files(path))


def _check_name(path: Path, family: FolderFamily) -> None:
    """Makes sure that a file or folder whose contents may be of several families is not named as one of the others.

    Raises:
        ValueError: it is; the message says how to tell which it is.
    """
    others = alike(family)
    said = set(re.findall(r"[a-z0-9]+", path.name.lower())) & {each.word for each in others}
    if said:
        titled = ", ".join(repr(each.title) for each in (family, *others))
        raise ValueError(
            f"cannot load {str(path)!r}: its name says {', '.join(map(repr, sorted(said)))}, but nothing in it tells "
            f"what it is; say it by family=, one of {titled}"
        )


def _offload(offload: str | None, family: FolderFamily) -> Offload:
    """A choice that the family has. ValueError otherwise."""
    if offload == "blocks" and family.layout.denoiser == "unet":
        raise ValueError(
            f"offload is 'blocks', which walks a list of equal blocks; {NO_BLOCKS}: {family.title} takes 'encoders'"
        )
    for choice in get_args(Offload):
        if choice == (offload or "none"):
            return choice
    raise ValueError(f"offload is {offload!r}; it must be one of {', '.join(get_args(Offload))}")


def _loaded(family: FolderFamily, parts: Parts) -> ImagePipeline:
    """The pipeline; encoders that stay in their files are told the device that they run on."""
    with naming_variants((path for path in parts.paths if path.is_dir()), parts.variant):
        pipe = family.load(parts)
    pipe = dataclasses.replace(pipe, origin=origin_of(pipe, family.layout, parts))
    if parts.offload == "none":
        return pipe
    read = {role for role, part in parts.encoders.items() if isinstance(part, ModelSource)}
    told = {role: moved(pipe.encoders[role], parts.device, None) for role in read}
    return dataclasses.replace(pipe, encoders={**pipe.encoders, **told})


def _refuse_other_files(path: Path) -> None:
    """Says what a path is that holds no denoiser by its name."""
    looks: str | None = None
    if path.is_dir():
        looks = _looks_of_folder(path)
    elif path.suffix == ".incomplete":
        looks = "a download that did not finish"
    elif path.suffix.lower() in PICKLED:
        looks = f"a {path.suffix} file: pickled weights are never loaded, convert them to safetensors"
    elif path.suffix.lower() not in SINGLE:
        looks = f"a {path.suffix or 'nameless'} file"
    if looks is not None:
        raise ValueError(f"cannot load {str(path)!r}, {looks}; supported today are {supported()}")


def _looks_of_folder(path: Path) -> str | None:
    if not (path / CONFIG).is_file():
        found = sorted(file.name for file in path.iterdir() if file.suffix.lower() in SINGLE)
        inside = f"; it holds {', '.join(found[:3])}, which may be files to load" if found else ""
        return f"a folder without a config.json or a model_index.json{inside}"
    is_denoiser = "_class_name" in json_object(path / CONFIG)
    return None if is_denoiser else "a language model's folder, which calotype.load_language_model may load"
