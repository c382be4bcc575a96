"""The files of the plate family: weights, tokenizer and a config, in one folder."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from ..core.attention.base import AttentionSelector
from ..core.checkpoint import file_digest, read_header
from ..core.config_sizes import check_config_sizes
from ..core.json_file import json_object
from ..core.key_map import KeyMap, named_weights
from ..core.key_rules import Layout, Rule
from ..core.loading import build_on_meta, load_weights, save_weights
from ..core.naming import naming
from ..core.whole_file import whole_file
from ..denoisers.plate import PlateDenoiser, PlateDenoiserConfig
from ..encoders.language import LanguageModelEncoder
from ..language.model import LanguageModel, LanguageModelConfig
from ..language.text import TextModel
from ..language.tokenizer import Tokenizer, load_tokenizer, text_tokenizer_of
from ..vae.plate import PlateClipVAE, PlateClipVAEConfig, PlateVAE, PlateVAEConfig
from ..vae.preview import LatentPreview
from .base import Source
from .family import PlainFamily
from .frames import frames_in_group
from .image import ImagePipeline
from .recipe import Recipe

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FAMILY = "plate"
WEIGHTS = ("denoiser.safetensors", "vae.safetensors", "language.safetensors")
FILES = ("config.json", "tokenizer.json", *WEIGHTS)
PREVIEW = ("preview.weight", "preview.bias")
MAY_BE_ZERO = ("layer", "text_layers", "frame_offset", "encoder_blocks", "decoder_blocks", "norm_offset")

Config = TypeVar("Config", bound="DataclassInstance")


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Where the language model is read as a text encoder."""

    layer: int = 2
    normed: bool = False
    max_tokens: int = 32


def load_plate(
    folder: Path, name: str, *, device: torch.device, dtype: torch.dtype, attention: AttentionSelector
) -> ImagePipeline:
    """The pipeline of a folder with `FILES`; `name` is what loads it again.

    Raises:
        FileNotFoundError: a file is missing. ValueError: a file is damaged, or they do not belong together.
    """
    check_files(folder, FILES)
    config = read_config(folder / "config.json")
    _check_sizes(folder, WEIGHTS)
    weights = {file: check_digest(folder / file, config) for file in (*WEIGHTS, "tokenizer.json")}
    denoiser = build_on_meta(lambda: PlateDenoiser(part(folder, config, "denoiser", PlateDenoiserConfig)))
    vae = _autoencoder(folder, config)
    clips = isinstance(vae, PlateClipVAE)
    recipe = _with_frames(_recipe(folder, config), denoiser, vae) if clips else _recipe(folder, config)
    load_weights(denoiser, folder / WEIGHTS[0], dtype=dtype, device=device)
    load_weights(vae, folder / WEIGHTS[1], _without_preview(vae), dtype=dtype, device=device)
    return ImagePipeline(
        source=Source(family=FAMILY, name=name, weights=weights),
        recipe=recipe,
        denoiser=denoiser.requires_grad_(False).eval(),
        encoders={"llm": load_encoder(folder, config, device=device, dtype=dtype, attention=attention)},
        vae=vae.requires_grad_(False).eval(),
        attention=attention,
        family=PlainFamily(clips=clips),
        preview_projection=_read_preview(folder / WEIGHTS[1]),
        device=device,
        dtype=dtype,
    )


def _autoencoder(folder: Path, config: Mapping[str, Any]) -> PlateVAE:
    """That of clips, if the config says how many frames a group of them has; on the meta device."""
    if "group" not in entries(config, "vae"):
        return build_on_meta(lambda: PlateVAE(part(folder, config, "vae", PlateVAEConfig)))
    return build_on_meta(lambda: PlateClipVAE(part(folder, config, "vae", PlateClipVAEConfig)))


def _with_frames(recipe: Recipe, denoiser: PlateDenoiser, vae: PlateVAE) -> Recipe:
    """The recipe, whose clips are no longer than the denoiser's."""
    return dataclasses.replace(recipe, max_frames=1 + (denoiser.config.frames - 1) * frames_in_group(vae))


def load_encoder(
    folder: Path, config: Mapping[str, Any], *, device: torch.device, dtype: torch.dtype, attention: AttentionSelector
) -> LanguageModelEncoder:
    """The language model of a plate folder, as its text encoder."""
    model = build_on_meta(
        lambda: LanguageModel(part(folder, config, "language", LanguageModelConfig), attention=attention)
    )
    load_weights(model, folder / WEIGHTS[2], dtype=dtype, device=device)
    text = part(folder, config, "text", TextConfig)
    return LanguageModelEncoder(
        language_model=model.requires_grad_(False).eval(),
        tokenizer=load_tokenizer(folder / "tokenizer.json"),
        layer=text.layer,
        normed=text.normed,
        max_tokens=text.max_tokens,
    )


def load_text_model(
    folder: Path, *, device: torch.device, dtype: torch.dtype, attention: AttentionSelector
) -> TextModel:
    """The language model of a plate folder, to generate text with. Same errors as `load_plate`."""
    check_files(folder, ("config.json", "tokenizer.json", WEIGHTS[2]))
    config = read_config(folder / "config.json")
    _check_sizes(folder, WEIGHTS[2:])
    for file in (WEIGHTS[2], "tokenizer.json"):
        check_digest(folder / file, config)
    return text_model_of(load_encoder(folder, config, device=device, dtype=dtype, attention=attention))


def text_model_of(encoder: LanguageModelEncoder) -> TextModel:
    """A text encoder's own language model, to generate text with: the same weights, not a copy."""
    special = encoder.tokenizer.special
    return TextModel(
        language_model=encoder.language_model,
        tokenizer=text_tokenizer_of(encoder.tokenizer),
        name=FAMILY,
        banned=tuple(token for token in (special.pad, special.bos, special.expand) if token is not None),
        expand_token=special.expand,
    )


def check_files(folder: Path, files: Sequence[str]) -> None:
    """Makes sure that all files are there, with a FileNotFoundError that names the first that is not."""
    for file in files:
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{folder / file}: no such file; a plate folder holds {', '.join(FILES)}")


def _check_sizes(folder: Path, files: Sequence[str]) -> None:
    headers = (read_header(folder / file) for file in files)
    check_config_sizes(folder, [tensor for header in headers for tensor in header.tensors.values()])


def check_digest(file: Path, config: Mapping[str, Any]) -> str:
    """The sha256 of a file, which is that in the config's "sha256" where it has one.

    Raises:
        ValueError: it is another.
    """
    if file.suffix == ".safetensors":
        read_header(file)  # says more of a file that is cut short or of another kind
    digest, wanted = file_digest(file), entries(config, "sha256").get(file.name)
    if wanted is not None and digest != wanted:
        raise ValueError(f"{file} is damaged: its sha256 is {digest[:12]}... instead of {str(wanted)[:12]}...")
    return digest


def save_plate(pipe: ImagePipeline, folder: Path) -> None:
    """Writes the files of a pipeline of this family; each appears whole or not at all.

    Raises:
        ValueError: a component is of another family, or the folder cannot be written to.
    """
    denoiser, vae, encoder = pipe.denoiser, pipe.vae, pipe.encoders.get("llm")
    if not (
        isinstance(denoiser, PlateDenoiser) and isinstance(vae, PlateVAE) and isinstance(encoder, LanguageModelEncoder)
    ):
        kinds = ", ".join(type(each).__name__ for each in (denoiser, vae, encoder))
        raise ValueError(f"cannot save {kinds}: only loaded pipelines, or those whose parts are all {FAMILY}'s, can be")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder}: cannot make this folder: {error.strerror}") from None
    text = TextConfig(layer=encoder.layer, normed=encoder.normed, max_tokens=encoder.max_tokens)
    parts: dict[str, DataclassInstance] = {
        "denoiser": denoiser.config,
        "vae": vae.config,
        "language": encoder.language_model.config,
        "text": text,
        "recipe": pipe.recipe,
    }
    config = {"family": FAMILY} | {name: dataclasses.asdict(value) for name, value in parts.items()}
    save_weights(denoiser, folder / WEIGHTS[0])
    save_weights(with_preview(vae, pipe.preview_projection), folder / WEIGHTS[1])
    save_weights(encoder.language_model, folder / WEIGHTS[2])
    _write(folder / "tokenizer.json", _tokenizer_text(encoder.tokenizer))
    digests = {"sha256": {name: file_digest(folder / name) for name in FILES if name != "config.json"}}
    _write(folder / "config.json", json.dumps(config | digests, indent=2) + "\n")


def read_config(path: Path) -> Mapping[str, Any]:
    """A config file's entries.

    Raises:
        ValueError: not a JSON object, or one of another family.
    """
    config = json_object(path)
    if config.get("family") != FAMILY:
        raise ValueError(f"{path}: family is {config.get('family')!r}; the only family that loads today is {FAMILY!r}")
    return config


def entries(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The entries of one part of a config; none where it is left out."""
    found = config.get(name, {})
    if not isinstance(found, dict):
        raise ValueError(f"config's {name} is {found!r}; it must be an object")
    return cast(Mapping[str, Any], found)


def part(folder: Path, config: Mapping[str, Any], name: str, kind: type[Config]) -> Config:
    """One part of a folder's config as its dataclass, JSON lists as tuples.

    Raises:
        ValueError: entries that are unknown, missing, of another type, out of range, or do not go together.
    """
    with naming(folder / "config.json"):
        return _part(config, name, kind)


def _recipe(folder: Path, config: Mapping[str, Any]) -> Recipe:
    with naming(folder / "config.json"):
        return Recipe.from_config(entries(config, "recipe"))


def _part(config: Mapping[str, Any], name: str, kind: type[Config]) -> Config:
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in entries(config, name).items()}
    hints = get_type_hints(kind)
    for key, value in given.items():
        if key in hints and not _is_a(value, hints[key]):
            raise ValueError(f"config's {name} has {key} {value!r}; it must be of type {hints[key]}")
        if not _in_range(key, value):
            least = "0 or more" if key in MAY_BE_ZERO else "more than 0"
            raise ValueError(f"config's {name} has {key} {value!r}; it must be {least}")
    try:
        return kind(**given)
    except TypeError as error:
        raise ValueError(f"config's {name} does not fit {kind.__name__}: {error}") from None


def _is_a(value: object, hint: Any) -> bool:
    """Whether a value is of the type of a config's field: a plain class, None, one of some words, or a tuple."""
    if isinstance(hint, UnionType):
        return any(_is_a(value, kind) for kind in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:
        kinds, found = get_args(hint), cast(tuple[object, ...], value) if isinstance(value, tuple) else None
        if found is not None and kinds[-1] is Ellipsis:
            return all(type(each) is kinds[0] for each in found)
        return found is not None and [type(each) for each in found] == list(kinds)
    return type(value) is hint or (hint is float and type(value) is int)


def _in_range(key: str, value: object) -> bool:
    """Whether a number, or every one of several, can be a size: finite, and more than 0 or, where that may be, 0."""
    if isinstance(value, tuple):
        return all(_in_range(key, each) for each in cast(tuple[object, ...], value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    return math.isfinite(value) and (value >= 0 if key in MAY_BE_ZERO else value > 0)


def with_preview(vae: PlateVAE, preview: LatentPreview | None) -> nn.Module:
    """A module with the autoencoder's own weights and, beside them, the preview's: what `vae.safetensors` holds."""
    if preview is None:
        return vae
    holder = nn.Module()
    for name, child in vae.named_children():
        holder.add_module(name, child)
    for name, buffer in vae.named_buffers(recurse=False):
        holder.register_buffer(name, buffer)
    projection = nn.Module()
    projection.register_buffer("weight", preview.weight)
    projection.register_buffer("bias", preview.bias)
    holder.add_module("preview", projection)
    return holder


def _without_preview(vae: PlateVAE) -> KeyMap:
    rules = tuple(Rule(name, name) for name in named_weights(vae))
    return KeyMap((Layout(FAMILY, rules, drops=PREVIEW),))


def _read_preview(path: Path) -> LatentPreview | None:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        if not names.issuperset(PREVIEW):
            return None
        weight, bias = (cast(Tensor, file.get_tensor(name)).float() for name in PREVIEW)
    return LatentPreview(weight=weight, bias=bias)


def _tokenizer_text(tokenizer: Tokenizer) -> str:
    return tokenizer.raw.to_str()


def _write(path: Path, text: str) -> None:
    try:
        with whole_file(path) as beside:
            beside.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None
