"""From a source to a pipeline."""

from pathlib import Path
from typing import cast

import torch

from .. import plate as bundled
from ..core.attention.base import AttentionBackend, AttentionSelector
from ..core.attention.registry import attention_selector
from ..core.json_file import json_object
from ..vae.base import Autoencoder
from .finder import Finder
from .folders import CONFIG, is_diffusers
from .from_diffusers import telling
from .given import EncoderSources, Given, PartSource, TokenizerSources
from .image import ImagePipeline
from .placement import device_named, dtype_named

BUNDLED = "plate"


@telling
def load(
    source: str | Path | None = None,
    *,
    family: str | None = None,
    denoiser: PartSource | None = None,
    encoders: EncoderSources | None = None,
    vae: PartSource | Autoencoder | None = None,
    tokenizers: TokenizerSources | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    offload: str | None = None,
    attention: str | AttentionBackend | AttentionSelector | None = None,
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

    `family` says what a file or a component's folder is ("Qwen-Image-Edit", "FLUX.1 Kontext") where nothing in it tells
    that from another family: `calotype inspect` lists them. A name that speaks for one of these is refused without.

    `device`: default the CPU. `dtype` of the weights: default float32; float8 and GGUF's formats are turned into it.
    `attention`: a backend or its name, or a selector; default the fastest that takes each call. "sliding_tile" (clips
    of Wan and LTX-Video) and "blocked_bfloat16" are approximations, see `core.attention.approximate`.

    `offload`, for all but plate: which weights stay in their files until they are used, and go again after: "none",
    "encoders" (text encoders, for each encoding), or "blocks" (those, and the denoiser's blocks, for each step: one
    is in memory at a time). The results are bit-equal. The files must stay as they are.

    Raises:
        ValueError: a source that is not supported, an argument that it does not use, parts that are missing (and how
        they are given) or do not fit together, a damaged file. Headers and sizes of all files are looked at first.
        FileNotFoundError: no such file or folder, or a part of it is missing.
    """
    given = Given(denoiser=denoiser, encoders=encoders, tokenizers=tokenizers, vae=vae, family=family)
    finder = Finder(revision=revision, variant=variant, token=token, local_files_only=local_files_only)
    path = _bundled_or(source, given, finder)
    plain = is_plate(path)
    if plain:
        _refuse_arguments(source, given, finder, offload)
    place = device_named("cpu" if device is None else device)
    kind = dtype_named(torch.float32 if dtype is None else dtype)
    selector = attention if isinstance(attention, AttentionSelector) else attention_selector(attention)
    if plain:
        from .plate import load_plate

        name = BUNDLED if source is None or source == BUNDLED else str(path.resolve())
        return load_plate(path, name, device=place, dtype=kind, attention=selector)
    from .load_family import load_family

    name = str(path.resolve()) if Path(str(source)).expanduser().exists() else str(source)
    return load_family(path, name, given, finder, device=place, dtype=kind, attention=selector, offload=offload)


def is_plate(path: Path) -> bool:
    """Whether `pipe.save` of the bundled model wrote this folder: no other kind of folder has such a config.json."""
    config = path / CONFIG
    if not path.is_dir() or is_diffusers(path) or not config.is_file():
        return False
    return not {"_class_name", "architectures", "model_type"} & set(json_object(config))


def _bundled_or(source: str | Path | None, given: Given, finder: Finder) -> Path:
    """The file or folder that a source stands for. The families are imported where it is not the bundled model."""
    if source is None or source == BUNDLED:
        return bundled_folder()
    from .load_family import supported

    if not isinstance(cast(object, source), str | Path) or source == "":
        raise ValueError(f"cannot load {source!r}, of type {type(source).__name__}; supported today are {supported()}")
    try:
        return finder.find(source, given.needed, whole=True)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"cannot load {str(source)!r}: {error}; supported today are {supported()}") from None


def _refuse_arguments(source: str | Path | None, given: Given, finder: Finder, offload: str | None) -> None:
    """What the bundled model's kind has no use for."""
    names = given.keywords + tuple(name for name in ("revision", "variant", "token") if vars(finder)[name] is not None)
    for name in names:
        raise ValueError(f"{name}: {source or BUNDLED} does not use this argument; it is loaded whole, from one folder")
    if offload not in (None, "none"):
        raise ValueError(f"offload: {source or BUNDLED} does not use this argument; it is small, and always in memory")


def bundled_folder() -> Path:
    """The folder of the bundled model's files."""
    return Path(str(bundled.__file__)).parent / "assets"
