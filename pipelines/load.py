"""From a source to a pipeline."""

import dataclasses
from pathlib import Path
from typing import cast, get_args

import torch

from .. import plate as bundled
from ..core.attention.base import AttentionSelector
from ..core.attention.registry import attention_selector
from ..core.component_files import weights_files
from ..core.copies import moved
from ..core.json_file import json_object
from ..denoisers.unet import NO_BLOCKS
from ..language.checkpoints import StoredModel
from ..vae.base import Autoencoder
from .families import FolderFamily, family_of_folder, titles
from .finder import SINGLE, Finder
from .folders import CONFIG
from .gather import gather, is_diffusers
from .given import EncoderSources, Given, PartSource, TokenizerSources
from .image import ImagePipeline
from .origin import origin_of
from .parts import Layout, Offload, Parts
from .placement import device_named, dtype_named
from .recognise import recognise

BUNDLED = "plate"
PICKLED = (".ckpt", ".pt", ".pth", ".bin", ".pkl")
SUPPORTED = (
    f"{BUNDLED!r} (the bundled model), folders that its pipe.save() wrote, folders in diffusers' layout and hub ids of "
    f"{titles()}, and .safetensors or .gguf files of their denoisers"
)


def load(
    source: str | Path | None = None,
    *,
    denoiser: PartSource | None = None,
    encoders: EncoderSources | None = None,
    vae: PartSource | Autoencoder | None = None,
    tokenizers: TokenizerSources | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    offload: str | None = None,
    attention: str | AttentionSelector | None = None,
    revision: str | None = None,
    variant: str | None = None,
    token: str | None = None,
    local_files_only: bool = False,
) -> ImagePipeline:
    """A pipeline, ready to run.

    `source`: None or "plate" is the bundled model; a folder that its `pipe.save` wrote; of a family in
    `pipelines/families.py` a folder in diffusers' layout, a hub id ("owner/name"), or a .safetensors or .gguf file (or
    component folder) with its denoiser. Of a hub id only the components that are used are downloaded, once, after their
    size was told; `local_files_only`: nothing is. `revision` and `token` are for the hub, `variant`, such as "fp16",
    picks files where a component has several.

    A single file may hold the autoencoder and text encoders too; the parts that it lacks are given, those of a folder
    or a file may be replaced. `denoiser`, `vae`: a file, a component's folder, or that part of a folder in diffusers'
    layout or a hub id. `encoders`: folders or files by role ("clip", "clip_2", "t5", "llm"), or one folder in
    diffusers' layout (or hub id), or file, for all roles. `tokenizers`: folders alike; they come from where encoders
    come from, unless they are given. Encoders and autoencoders may be those of another pipeline;
    they stay where and as they are.

    `device`: default the CPU. `dtype` of the weights: default float32; float8 and GGUF's formats are turned into it.
    `attention`: a backend's name, or a selector; default the fastest that takes each call.

    `offload`, for all but plate: which weights stay in their files until they are used, and go again after: "none",
    "encoders" (text encoders, for each encoding), or "blocks" (those, and the denoiser's blocks, for each step: one
    is in memory at a time). The results are bit-equal. The files must stay as they are.

    Raises:
        ValueError: a source that is not supported, an argument that it does not use, parts that are missing (and how
        they are given) or do not fit together, a damaged file. Headers and sizes of all files are looked at first.
        FileNotFoundError: no such file or folder, or a part of it is missing.
    """
    given = Given(denoiser=denoiser, encoders=encoders, tokenizers=tokenizers, vae=vae)
    finder = Finder(revision=revision, variant=variant, token=token, local_files_only=local_files_only)
    path = _bundled_or(source, given, finder)
    if is_plate(path):
        _refuse_arguments(source, given, finder, offload)
    place = device_named("cpu" if device is None else device)
    kind = dtype_named(torch.float32 if dtype is None else dtype)
    selector = attention if isinstance(attention, AttentionSelector) else attention_selector(attention)
    if is_plate(path):
        from .plate import load_plate

        name = BUNDLED if source is None or source == BUNDLED else str(path.resolve())
        return load_plate(path, name, device=place, dtype=kind, attention=selector)
    family = family_of(path, given)
    chosen = _offload(offload, family)
    places = gather(path, family, given, dataclasses.replace(finder, revision=None)).places(variant)
    name = str(path.resolve()) if Path(str(source)).expanduser().exists() else str(source)
    parts = Parts(**vars(places), name=name, device=place, dtype=kind, attention=selector, offload=chosen)
    return _loaded(family, parts)


def family_of(path: Path, given: Given) -> FolderFamily:
    """The family of a folder in diffusers' layout, or of a denoiser in a file or a component's folder.

    Raises:
        FileNotFoundError, ValueError: it has none, or cannot be told from it.
    """
    if is_diffusers(path):
        return family_of_folder(path)
    _refuse_other_files(path)
    if given.denoiser is not None:
        raise ValueError(f"denoiser: {path} is one already; give a folder in diffusers' layout to replace its denoiser")
    try:
        return recognise(weights_files(path))
    except ValueError as error:
        raise ValueError(f"cannot load {str(path)!r}: {error}") from None


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
    pipe = family.load(parts)
    pipe = dataclasses.replace(pipe, origin=origin_of(pipe, family.layout, parts))
    if parts.offload == "none":
        return pipe
    read = {role for role, part in parts.encoders.items() if isinstance(part, Path | StoredModel)}
    told = {role: moved(pipe.encoders[role], parts.device, None) for role in read}
    return dataclasses.replace(pipe, encoders={**pipe.encoders, **told})


def is_plate(path: Path) -> bool:
    """Whether `pipe.save` of the bundled model wrote this folder: no other kind of folder has such a config.json."""
    config = path / CONFIG
    if not path.is_dir() or is_diffusers(path) or not config.is_file():
        return False
    return not {"_class_name", "architectures", "model_type"} & set(json_object(config))


def _bundled_or(source: str | Path | None, given: Given, finder: Finder) -> Path:
    """The file or folder that a source stands for."""
    if source is None or source == BUNDLED:
        return bundled_folder()
    if not isinstance(cast(object, source), str | Path) or source == "":
        raise ValueError(f"cannot load {source!r}, of type {type(source).__name__}; supported today are {SUPPORTED}")
    try:
        return finder.find(source, lambda layout: _needed(layout, given), whole=True)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"cannot load {str(source)!r}: {error}; supported today are {SUPPORTED}") from None


def _needed(layout: Layout, given: Given) -> list[str]:
    """The components of a repository that are not given."""
    return [name for name in layout.folders if name not in given.covered(layout)]


def _refuse_arguments(source: str | Path | None, given: Given, finder: Finder, offload: str | None) -> None:
    """What the bundled model's kind has no use for."""
    names = given.keywords + tuple(name for name in ("revision", "variant", "token") if vars(finder)[name] is not None)
    for name in names:
        raise ValueError(f"{name}: {source or BUNDLED} does not use this argument; it is loaded whole, from one folder")
    if offload not in (None, "none"):
        raise ValueError(f"offload: {source or BUNDLED} does not use this argument; it is small, and always in memory")


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
        raise ValueError(f"cannot load {str(path)!r}, {looks}; supported today are {SUPPORTED}")


def _looks_of_folder(path: Path) -> str | None:
    if not (path / CONFIG).is_file():
        found = sorted(file.name for file in path.iterdir() if file.suffix.lower() in SINGLE)
        inside = f"; it holds {', '.join(found[:3])}, which may be files to load" if found else ""
        return f"a folder without a config.json or a model_index.json{inside}"
    is_denoiser = "_class_name" in json_object(path / CONFIG)
    return None if is_denoiser else "a language model's folder, which calotype.load_language_model may load"


def bundled_folder() -> Path:
    """The folder of the bundled model's files."""
    return Path(str(bundled.__file__)).parent / "assets"
