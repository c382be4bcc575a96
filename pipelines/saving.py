"""Pipelines as folders in diffusers' layout, which `load` and diffusers read."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.naming import naming
from ..core.saving import Component, Saveable, write_weights
from ..core.whole_file import whole_folder
from ..encoders.base import TextEncoder
from ..encoders.origin import SaveableEncoder, TextComponent, settings_of
from .folders import CONFIG, INDEX, NAME, SCHEDULER_CONFIG
from .frames import BesideLatents
from .origin import Origin, chosen, denoisers

if TYPE_CHECKING:
    from .image import ImagePipeline

DIFFUSERS_WEIGHTS, TRANSFORMERS_WEIGHTS = "diffusion_pytorch_model.safetensors", "model.safetensors"
PYTORCH = {"format": "pt"}
"""What transformers looks for in a file of weights."""
_TEXTS = (".json", ".txt", ".model", ".jinja")
_TOKENIZER = "tokenizer"
Class = tuple[str, str]
"""A library and a class in it, as model_index.json has them."""


@dataclass(frozen=True, kw_only=True)
class _Folder:
    """All that is written: parts, files of options by their folders, and folders of tokenizers, by their names; the
    class of each."""

    parts: Mapping[str, Component]
    texts: Mapping[str, TextComponent]
    tokenizers: Mapping[str, Path]
    options: Mapping[str, tuple[str, Mapping[str, Any]]]
    classes: Mapping[str, Class]

    @property
    def num_bytes(self) -> int:
        """Of all weights."""
        return sum(
            weight.num_bytes
            for part in (*self.parts.values(), *self.texts.values())
            for weight in part.weights.values()
        )


def save_folder(pipe: "ImagePipeline", origin: Origin, folder: Path) -> None:
    """Writes what the pipeline holds; the folder appears whole or not at all. Of a part that was not changed since, the
    config is that of the file it came from.

    Raises:
        ValueError: the folder holds something, or cannot be written to; or a part, or a choice, that loading it again
        would not give back. FileNotFoundError: files that hold weights which are not in memory are gone.
    """
    folder = folder.expanduser().resolve()
    _check_target(folder)
    _check_choices(pipe, origin)
    _check_encoders(pipe, origin)
    content = _content(pipe, origin)
    _check_room(folder, content.num_bytes)
    try:
        with whole_folder(folder) as stage:
            _write(content, stage)
            _write_json(stage / INDEX, _index(origin, content.classes))
    except OSError as error:
        raise ValueError(f"cannot write {folder}: {error.strerror or error}") from None


def _content(pipe: "ImagePipeline", origin: Origin) -> _Folder:
    layout = origin.layout
    networks = denoisers(pipe, layout)
    parts = {name: _component("denoiser", name, part, origin) for name, part in networks.items()}
    parts[layout.vae] = _component("vae", layout.vae, pipe.vae, origin)
    texts = {layout.encoders[role]: _text(role, encoder, origin) for role, encoder in pipe.encoders.items()}
    tokenizers, classes = dict[str, Path](), dict[str, Class]()
    for role in pipe.encoders:
        text, name = texts[layout.encoders[role]], layout.tokenizers[role]
        tokenizers[name] = text.tokenizer
        classes[name] = ("transformers", layout.processors.get(role, text.tokenizer_class))
        if role in layout.processors:
            tokenizers[_TOKENIZER] = text.tokenizer
            classes[_TOKENIZER] = ("transformers", text.tokenizer_class)
    if layout.pictures is not None and (picture := _picture_encoder(pipe)) is not None:
        name, processor = layout.pictures
        texts[name], tokenizers[processor] = picture, picture.tokenizer
        classes[processor] = ("transformers", picture.tokenizer_class)
    options = {layout.scheduler: (SCHEDULER_CONFIG, origin.scheduler)}
    options |= {name: (file, origin.options[name]) for name, file in layout.configs.items()}
    told = {name: (value[0], value[1]) for name, value in origin.index.items() if name in classes and _is_class(value)}
    return _Folder(
        parts=parts,
        texts=texts,
        tokenizers=tokenizers,
        options=options,
        classes={
            **{name: ("diffusers", str(entries["_class_name"])) for name, (_, entries) in options.items()},
            **{name: ("diffusers", str(part.entries["_class_name"])) for name, part in parts.items()},
            **{name: ("transformers", str(part.entries["architectures"][0])) for name, part in texts.items()},
            **classes,
            **told,
        },
    )


def _component(field: str, name: str, part: object, origin: Origin) -> Component:
    """What is saved of the denoiser or the autoencoder."""
    if not isinstance(part, Saveable):
        raise ValueError(f"cannot save {field}: a {type(part).__name__} has no place in a folder in diffusers' layout")
    with naming(f"cannot save {field}"):
        component = part.component()
    file = origin.configs.get(name)
    if file is not None and file.config == part.config:
        return Component(entries=file.entries, weights=component.weights)
    named = {NAME: origin.files[name]} if name in origin.files else {}
    return Component(entries={**named, **component.entries}, weights=component.weights)


def _check_encoders(pipe: "ImagePipeline", origin: Origin) -> None:
    """Makes sure that there are those that the family has. ValueError otherwise."""
    known = origin.layout.encoders
    absent = [role for role, name in known.items() if role not in pipe.encoders and name not in origin.layout.optional]
    strange = [role for role in pipe.encoders if role not in known]
    if absent or strange:
        wanted = ", ".join(map(repr, known))
        raise ValueError(f"cannot save encoders for {', '.join(map(repr, pipe.encoders))}; this family has {wanted}")


def _text(role: str, encoder: TextEncoder, origin: Origin) -> TextComponent:
    """What is saved of a text encoder, which must read prompts as the one that is loaded for its role does."""
    what = f"cannot save encoders[{role!r}]"
    saveable = _saveable(what, encoder)
    now, then = settings_of(encoder), origin.settings.get(role)
    if then is not None and now != then:
        name = next(name for name in now | dict(then) if now.get(name) != then.get(name))
        raise ValueError(
            f"{what}: its {name} is {now.get(name)!r}, which a folder does not hold: it would be loaded with "
            f"{then.get(name)!r}"
        )
    return _encoder_component(what, saveable)


def _picture_encoder(pipe: "ImagePipeline") -> TextComponent | None:
    """What is saved of the one that sees what clips begin with, if there is one."""
    encoder = pipe.looking.encoder if isinstance(pipe.looking, BesideLatents) else None
    if encoder is None:
        return None
    what = "cannot save the picture encoder"
    return _encoder_component(what, _saveable(what, encoder))


def _saveable(what: str, encoder: object) -> SaveableEncoder:
    if not isinstance(encoder, SaveableEncoder):
        raise ValueError(f"{what}: a {type(encoder).__name__} has no place in a folder in diffusers' layout")
    return encoder


def _encoder_component(what: str, encoder: SaveableEncoder) -> TextComponent:
    try:
        return encoder.component()
    except (ValueError, FileNotFoundError) as error:
        raise type(error)(f"{what}: {error}") from None


def _check_choices(pipe: "ImagePipeline", origin: Origin) -> None:
    """Makes sure that all choices are those that files make. ValueError otherwise."""
    for name, value in chosen(pipe).items():
        if value != origin.chosen[name]:
            raise ValueError(
                f"cannot save {name}: it is not the one that was loaded, and a folder in diffusers' layout has no "
                "place for it"
            )


def _check_target(folder: Path) -> None:
    """Makes sure that a folder can be put here. ValueError otherwise."""
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; pipelines are saved to new folders")
    if folder.exists() and (not folder.is_dir() or folder.is_mount()):
        what = "the top of a file system; name a folder inside it" if folder.is_dir() else "a file, not a folder"
        raise ValueError(f"{folder} is {what}")


def _check_room(folder: Path, num_bytes: int) -> None:
    place = next(each for each in (folder, *folder.parents) if each.is_dir())
    free = shutil.disk_usage(place).free
    if free < num_bytes:
        raise ValueError(f"cannot write {folder}: it takes {num_bytes / 1e9:.2f} GB, {free / 1e9:.2f} GB are free")


def _write(content: _Folder, stage: Path) -> None:
    parts = {name: (part, DIFFUSERS_WEIGHTS) for name, part in content.parts.items()}
    texts = {name: (part, TRANSFORMERS_WEIGHTS) for name, part in content.texts.items()}
    for name, (part, file) in (parts | texts).items():
        (stage / name).mkdir()
        _write_json(stage / name / CONFIG, part.entries)
        write_weights(stage / name / file, part.weights, PYTORCH)
    for name, text in content.texts.items():
        for path in text.others:
            shutil.copyfile(path, stage / name / path.name)
    for name, source in content.tokenizers.items():
        (stage / name).mkdir()
        for path in sorted(source.iterdir()):
            if path.suffix in _TEXTS and not path.name.endswith((".index.json", INDEX)) and path.is_file():
                shutil.copyfile(path, stage / name / path.name)
    for name, (file, entries) in content.options.items():
        (stage / name).mkdir()
        _write_json(stage / name / file, entries)


def _index(origin: Origin, classes: Mapping[str, Class]) -> dict[str, object]:
    """The entries of model_index.json: components that are not written (a safety checker) are null."""
    kept = {name: [None, None] if _is_class(value) else value for name, value in origin.index.items()}
    absent = {name: [None, None] for name in origin.layout.optional}
    written = {name: list(each) for name, each in classes.items()}
    return {**absent, **kept, **written}


def _is_class(value: object) -> bool:
    """Whether an entry of model_index.json is a component's."""
    match value:
        case [str() | None, str() | None]:
            return True
        case _:
            return False


def _write_json(path: Path, entries: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
