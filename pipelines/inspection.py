"""What a model's files hold, and the memory that it takes, told from their headers alone.

Legend: S pixels a side.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from ..core.checkpoint import Files, part_of, read_checkpoint
from ..core.component_files import weights_files
from ..core.gguf_file import GGUFFile, gguf_shards
from ..core.shapes import Shapes
from ..core.stored_tensor import StoredTensor
from ..denoisers.shapes import PREFIXES
from ..language.checkpoints import ModelSource, model_config, model_weights
from ..language.config import LanguageModelConfig
from ..language.gguf_config import gguf_config
from ..vae.kl_keys import PREFIXES as AUTOENCODER_PREFIXES
from .families import alike
from .finder import Finder
from .folders import CONFIG, entries_of, is_diffusers
from .gather import Gathered, check_variant, gather
from .given import Given
from .load import BUNDLED, bundled_folder, is_plate
from .load_family import family_of, refusal
from .parts import ClipSize, Layout

DTYPES = (torch.float32, torch.bfloat16)
VALUES_PER_TOKEN, VALUES_PER_PIXEL = 20, 4
NUM_TEXT_TOKENS, LANGUAGE_TOKENS = 512, 4096
CELL = 8  # pixels a side of a latent cell
COLOURS = 3
_INPUTS = (
    *("img_in.weight", "x_embedder.weight", "pos_embed.proj.weight", "x_embedder.proj.weight"),
    *("all_x_embedder.2-1.weight", "conv_in.weight", "input_blocks.0.0.weight", "patch_embedding.weight"),
    *("patchify_proj.weight", "proj_in.weight", "img_in.proj.weight"),
)
_OUTPUTS = ("decoder.conv_out.weight", "decoder.conv_out.conv.weight", "decoder.head.2.weight")


@dataclass(frozen=True, kw_only=True)
class Component:
    """One part of a model. `formats` counts its parameters by the format that they are stored in; `bytes` are theirs in
    the files."""

    name: str
    path: str
    parameters: int
    bytes: int
    formats: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """A model. `others` are families that it may be of as well, as nothing in it tells. `missing` says what it needs
    besides, and how that is given, `advice` what gives several of them at once ("" where there is none). `refused` is
    the error of `calotype.load`, for models of pictures and clips that lack nothing and that it does not take all the
    same. `load` and `run` are bytes of memory by the dtype that it is loaded in, `run` an estimate whose basis is
    `estimate`; empty where there is none."""

    path: str
    kind: str
    family: str
    components: tuple[Component, ...]
    others: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    advice: str = ""
    refused: str | None = None
    load: Mapping[str, int]
    run: Mapping[str, int]
    estimate: str

    @property
    def parameters(self) -> int:
        """Of all components."""
        return sum(component.parameters for component in self.components)


def inspect_model(source: str | Path, variant: str | None = None) -> Inspection:
    """What a source is: whatever `calotype.load` or `calotype.load_language_model` take; of the hub, what was
    downloaded before. `variant`, such as "fp16", picks files where parts have several.

    Raises:
        FileNotFoundError: nothing of that name, or no part comes in the variant. ValueError: not a model, or a damaged
            one; a variant of a file, or of a folder that `pipe.save` wrote.
    """
    finder = Finder(local_files_only=True, variant=variant)
    path = bundled_folder() if source == BUNDLED else finder.find(source, lambda layout: ())
    if variant is not None and (is_plate(path) or not path.is_dir()):
        raise ValueError(f"variant is {variant!r}; {source} has one copy of its weights and takes none")
    if is_plate(path):
        files = {file.stem: file for file in sorted(path.glob("*.safetensors"))}
        return _inspection(
            path, "a folder that pipe.save wrote", "plate", {name: [file] for name, file in files.items()}
        )
    if path.is_dir() and not is_diffusers(path) and "_class_name" not in _config(path):
        check_variant((path,), variant)
        return _language_model(path, "a language model's folder", model_config(path), weights_files(path, variant))
    if path.suffix.lower() == ".gguf" and "token_embd.weight" in GGUFFile(path).tensors:
        shards = gguf_shards(path)
        tensors = {name: x for shard in shards for name, x in GGUFFile(shard).tensors.items()}
        return _language_model(path, "a GGUF file", gguf_config(GGUFFile(shards[0]).metadata, tensors, path), shards)
    return _picture_model(path, variant)


def _picture_model(path: Path, variant: str | None) -> Inspection:
    found = gather(path, family_of(path, Given()), Given(), Finder(variant=variant))
    check_variant(found.paths, found.variant)
    others = () if is_diffusers(path) else tuple(family.title for family in alike(found.family))
    layout = found.family.layout
    files: dict[str, Files] = {}
    if found.denoiser is not None:
        files[layout.denoiser] = part_of(weights_files(found.denoiser, found.variant), PREFIXES)
    if isinstance(found.vae, Path):
        files[layout.vae] = part_of(weights_files(found.vae, found.variant), AUTOENCODER_PREFIXES)
    for role, part in found.encoders.items():
        if isinstance(part, ModelSource):
            held = weights_files(part, found.variant) if isinstance(part, Path) else model_weights(part)
            files[layout.encoders[role]] = held
    files |= {name: weights_files(place, found.variant) for name, place in found.others.items()}
    kind = (
        "a folder in diffusers' layout" if is_diffusers(path) else "a denoiser's folder" if path.is_dir() else "a file"
    )
    refused = None if found.missing else refusal(path, found)
    values, estimate = _activations(found) if refused is None else (0, "")
    whole = _inspection(path, kind, found.family.title, files, values=values, estimate=estimate)
    return dataclasses.replace(whole, others=others, missing=found.missing, advice=found.advice, refused=refused)


def _language_model(path: Path, kind: str, config: LanguageModelConfig, files: Files) -> Inspection:
    tokens = min(LANGUAGE_TOKENS, config.context_length)
    values = 2 * config.layers * config.kv_heads * config.head_width * tokens
    estimate = f"weights, and keys and values of {tokens} tokens for one text"
    named = f"language model of {config.layers} layers, {config.width} wide"
    return _inspection(path, kind, named, {"model": files}, values=values, estimate=estimate)


def _inspection(
    path: Path,
    kind: str,
    family: str,
    files: Mapping[str, Files],
    *,
    values: int = 0,
    estimate: str = "",
) -> Inspection:
    tensors = {name: read_checkpoint(each) for name, each in files.items()}
    weights = {dtype: sum(_bytes_in(x, dtype) for part in tensors.values() for x in part.values()) for dtype in DTYPES}
    largest = max((prod(x.shape) for part in tensors.values() for x in part.values()), default=0)
    return Inspection(
        path=str(path),
        kind=kind,
        family=family,
        components=tuple(_component(name, part) for name, part in tensors.items()),
        load={_name(dtype): size + largest * dtype.itemsize for dtype, size in weights.items()},
        run={_name(dtype): size + values * dtype.itemsize for dtype, size in weights.items()} if values else {},
        estimate=estimate,
    )


def _activations(found: Gathered) -> tuple[int, str]:
    """How many values a run at the default size keeps beside the weights, and what that is made of."""
    if found.denoiser is None:
        return 0, ""
    shapes, layout = Shapes.read(weights_files(found.denoiser, found.variant), PREFIXES), found.family.layout
    width = next((shapes.shapes[name][0] for name in _INPUTS if name in shapes.shapes), 0)
    sample = _picture(layout) if layout.clip is None else _clip(layout.clip(shapes))
    tokens = sample.tokens
    counts = [
        (tokens * width * VALUES_PER_TOKEN, f"{tokens} tokens x {width} wide x {VALUES_PER_TOKEN} in the denoiser")
    ]
    if isinstance(found.vae, Path):
        channels = _channels(Shapes.read(weights_files(found.vae, found.variant), AUTOENCODER_PREFIXES))
        made = f"{sample.pixels} pixels x {channels} channels x {VALUES_PER_PIXEL} in the decoder"
        clip = f", with {sample.result} of the clip," if sample.result else ""
        counts.append((sample.pixels * channels * VALUES_PER_PIXEL + sample.result, made + clip))
    whole = f"weights, and for {sample.name} the larger of {' and '.join(made for _, made in counts)} values"
    return max(count for count, _ in counts), whole


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """What is made at the default size: `pixels` are decoded at once, `result` are the values of a clip, which is whole
    in the end."""

    name: str
    tokens: int
    pixels: int
    result: int = 0


def _picture(layout: Layout) -> _Sample:
    side = layout.side
    tokens = (side // CELL) ** 2 if layout.denoiser == "unet" else (side // (2 * CELL)) ** 2 + NUM_TEXT_TOKENS
    return _Sample(name=f"one picture of {side}x{side}", tokens=tokens, pixels=side * side)


def _clip(size: ClipSize) -> _Sample:
    area, latent_frames = size.width * size.height, 1 + (size.frames - 1) // size.group
    return _Sample(
        name=f"one clip of {size.frames} frames of {size.width}x{size.height}",
        tokens=latent_frames * (size.width // size.side) * (size.height // size.side) + NUM_TEXT_TOKENS,
        pixels=size.group * area,
        result=COLOURS * size.frames * area,
    )


def _channels(decoder: Shapes) -> int:
    """How many a decoder has for each pixel in its last layer, which may give several pixels from one place."""
    outputs, inputs = next((decoder.shapes[name][:2] for name in _OUTPUTS if name in decoder.shapes), (COLOURS, 0))
    return inputs * COLOURS // outputs


def _component(name: str, tensors: Mapping[str, StoredTensor]) -> Component:
    formats = Counter[str]()
    for tensor in tensors.values():
        formats[_format(tensor)] += prod(tensor.shape)
    return Component(
        name=name,
        path=str(_common_folder(tensors)),
        parameters=sum(prod(tensor.shape) for tensor in tensors.values()),
        bytes=sum(tensor.stop - tensor.start for tensor in tensors.values()),
        formats=dict(formats.most_common()),
    )


def _common_folder(tensors: Mapping[str, StoredTensor]) -> Path:
    """The file, or the folder of several."""
    files = list(dict.fromkeys(tensor.file for tensor in tensors.values()))
    return files[0] if len(files) == 1 else files[0].parent


def _format(tensor: StoredTensor) -> str:
    if tensor.blocks is not None:
        return tensor.blocks.name
    return _name(tensor.dtype) + ("" if tensor.factor is None else ", scaled")


def _bytes_in(tensor: StoredTensor, dtype: torch.dtype) -> int:
    return prod(tensor.shape) * (dtype if tensor.dtype.is_floating_point else tensor.dtype).itemsize


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _config(folder: Path) -> Mapping[str, object]:
    return entries_of(folder / CONFIG) if (folder / CONFIG).is_file() else {"_class_name": None}
