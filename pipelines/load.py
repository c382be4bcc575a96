"""From a source to a pipeline."""

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch

from .. import plate as bundled
from ..core.attention.base import AttentionSelector
from ..core.attention.registry import attention_selector
from .families import family_of_class, titles
from .folders import INDEX, pipeline_class
from .image import ImagePipeline
from .parts import parts_of_folder
from .placement import device_named, dtype_named

BUNDLED = "plate"
SUPPORTED = (
    f"{BUNDLED!r} (the bundled model), folders that its pipe.save() wrote, and folders in diffusers' layout of "
    f"{titles()}"
)


def load(
    source: str | Path | None = None,
    *,
    denoiser: object = None,
    encoders: object = None,
    vae: object = None,
    tokenizers: object = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    offload: str | None = None,
    attention: str | AttentionSelector | None = None,
    revision: str | None = None,
    variant: str | None = None,
    token: str | None = None,
    local_files_only: bool = False,
) -> ImagePipeline:
    """A pipeline, ready to run. Nothing is fetched from the network.

    `source`: None or "plate" is the bundled model; a folder that its `pipe.save` wrote; a folder in
    diffusers' layout of a family in `pipelines/families.py`. `device`: default the CPU. `dtype`
    of the weights: default float32. `attention`: a backend's name, or a selector; default the fastest that takes each
    call. `local_files_only` is accepted and changes nothing. The other arguments are for models that come in several
    parts, or over the network; none of those loads today.

    Raises:
        ValueError: a source that is not supported, an argument that it does not use, a damaged file.
        FileNotFoundError: a file of the folder is missing.
    """
    others: Mapping[str, object] = {
        "denoiser": denoiser,
        "encoders": encoders,
        "vae": vae,
        "tokenizers": tokenizers,
        "offload": offload,
        "revision": revision,
        "variant": variant,
        "token": token,
    }
    folder = source_folder(source)
    for name, value in others.items():
        if value is not None:
            raise ValueError(
                f"{name}: {source or BUNDLED} does not use this argument; it is loaded whole, from one folder"
            )
    place = device_named("cpu" if device is None else device)
    kind = dtype_named(torch.float32 if dtype is None else dtype)
    selector = attention if isinstance(attention, AttentionSelector) else attention_selector(attention)
    name = BUNDLED if source is None or source == BUNDLED else str(folder.resolve())
    if (folder / INDEX).is_file():
        family = family_of_class(pipeline_class(folder))
        assert family is not None, "source_folder has refused other classes"
        return family.load(
            parts_of_folder(folder, family.layout, name=name, device=place, dtype=kind, attention=selector)
        )
    from .plate import load_plate

    return load_plate(folder, name, device=place, dtype=kind, attention=selector)


def source_folder(source: str | Path | None) -> Path:
    """The folder that a source stands for.

    Raises:
        ValueError: nothing that can be loaded today; the message says what it looks like, and what can.
    """
    if source is None or source == BUNDLED:
        return bundled_folder()
    if not isinstance(cast(object, source), str | Path):
        raise ValueError(f"cannot load {source!r}, of type {type(source).__name__}; supported today are {SUPPORTED}")
    path = Path(source)
    if path.is_dir():
        if (path / INDEX).is_file():
            found = pipeline_class(path)
            if family_of_class(found) is not None:
                return path
            raise ValueError(
                f"cannot load {str(source)!r}, a diffusers folder of {found}; supported today are {SUPPORTED}"
            )
        if (path / "config.json").is_file():
            return path
        looks = "a folder without a config.json or a model_index.json"
        raise ValueError(f"cannot load {str(source)!r}, {looks}; supported today are {SUPPORTED}")
    looks = (
        f"a {path.suffix or 'nameless'} file" if path.is_file() else "neither a model's name nor a folder that is there"
    )
    if not path.exists() and str(source).count("/") == 1 and not str(source).startswith((".", "/", "~")):
        looks = "which looks like a repository on the Hugging Face Hub"
    raise ValueError(f"cannot load {str(source)!r}, {looks}; supported today are {SUPPORTED}")


def bundled_folder() -> Path:
    """The folder of the bundled model's files."""
    return Path(str(bundled.__file__)).parent / "assets"
