"""From a source to a language model."""

import dataclasses
from pathlib import Path
from typing import cast, get_args

import torch

from ..core.attention.base import AttentionSelector
from ..core.attention.registry import attention_selector
from ..core.json_file import json_object
from ..core.ops.packed_matrix import Kind
from ..language.packing import pack_language_model
from ..language.text import TextModel
from .load import BUNDLED, bundled_folder
from .placement import device_named, dtype_named


def load_language_model(
    source: str | Path | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    attention: str | AttentionSelector | None = None,
    packed: Kind | None = None,
    revision: str | None = None,
    token: str | None = None,
    local_files_only: bool = False,
) -> TextModel:
    """A language model with its tokenizer, ready to generate text.

    `source`: None or "plate" is the bundled one; else a folder that `pipe.save` wrote, a folder in transformers'
    layout, a .gguf file, or a hub id ("owner/name"), which is downloaded unless it was before (its size is told first)
    or `local_files_only`. `device`: default the CPU. `dtype` of the weights: default float32. `packed`: keep the big
    matrices in 8 or 4 bits ("w8a8": round what they are multiplied with too), an approximation whose error on weights
    `lm.packing` tells. `revision` and `token` are for the hub.

    Raises:
        ValueError: a source of another kind, an architecture that is not known, files that do not belong together.
        FileNotFoundError: no such file or folder, or a part of it is missing.
    """
    place = device_named("cpu" if device is None else device)
    kind = dtype_named(torch.float32 if dtype is None else dtype)
    selector = attention if isinstance(attention, AttentionSelector) else attention_selector(attention)
    _check_packing(packed, place)
    if source is None or source == BUNDLED:
        return _packed(_load_plate(bundled_folder(), place, kind, selector), packed)
    if not isinstance(cast(object, source), str | Path):
        raise ValueError(f"cannot load {source!r}, of type {type(source).__name__}; a source is a name or a path")
    from ..language.checkpoints import resolve_source

    path = resolve_source(source, revision=revision, token=token, local_files_only=local_files_only)
    return _packed(_load_path(path, str(source), place, kind, selector), packed)


def _load_path(
    path: Path, name: str, device: torch.device, dtype: torch.dtype, attention: AttentionSelector
) -> TextModel:
    """The model of a folder or a .gguf file."""
    if path.is_dir() and _is_plate(path):
        return _load_plate(path, device, dtype, attention)
    if path.is_dir():
        from ..language.checkpoints import load_transformers_folder

        _refuse_diffusers(path)
        model, tokenizer = load_transformers_folder(path, device=device, dtype=dtype, attention=attention)
    else:
        from ..language.gguf import load_gguf

        model, tokenizer = load_gguf(path, device=device, dtype=dtype, attention=attention)
    return TextModel(language_model=model, tokenizer=tokenizer, name=name)


def _load_plate(folder: Path, device: torch.device, dtype: torch.dtype, attention: AttentionSelector) -> TextModel:
    from .plate import load_text_model

    return load_text_model(folder, device=device, dtype=dtype, attention=attention)


def _is_plate(folder: Path) -> bool:
    """Whether `pipe.save` wrote this folder."""
    config = folder / "config.json"
    if not config.is_file():
        return False
    try:
        return "family" in json_object(config)
    except ValueError:
        return False


def _refuse_diffusers(folder: Path) -> None:
    if (folder / "model_index.json").is_file() and not (folder / "config.json").is_file():
        parts = sorted(each.name for each in folder.iterdir() if (each / "config.json").is_file())
        raise ValueError(
            f"cannot load {str(folder)!r}: a pipeline in diffusers' layout, not a language model; its parts are "
            f"{', '.join(parts) or 'missing'}"
        )


def _check_packing(packed: object, device: torch.device) -> None:
    if packed is not None and packed not in get_args(Kind):
        raise ValueError(f"packed is {packed!r}; it must be {', '.join(map(repr, get_args(Kind)))} or None")
    if packed is not None and device.type != "cpu":
        raise ValueError(f"packed={packed!r} runs on the CPU only, and device is {str(device)!r}")


def _packed(model: TextModel, packed: Kind | None) -> TextModel:
    if packed is None:
        return model
    return dataclasses.replace(model, packing=pack_language_model(model.language_model, packed))
