"""Language models from folders in transformers' layout, and from the Hugging Face Hub."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ..core.attention.base import AttentionSelector
from ..core.checkpoint import Files, read_checkpoint
from ..core.component_files import component_weights, refuse_quantised_entries
from ..core.config_sizes import check_config_sizes
from ..core.hub import hub_folder, is_hub_id
from ..core.json_file import json_object
from ..core.key_map import KeyMap
from ..core.loading import build_on_meta, load_weights
from ..core.naming import naming
from ..core.offload import StoredWeights, filled
from ..core.stored_tensor import StoredTensor
from ..core.weight_source import are_equal
from .config import LanguageModelConfig
from .families import family_of
from .families.keys import HEAD
from .model import LanguageModel, NoHead
from .tokenizer import TextTokenizer, load_text_tokenizer

_EMBEDDING = "embed_tokens.weight"
_INDEX = "model.safetensors.index.json"
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model in a weights file, which has no config.json: `entries` stand for those of one. `files` hold its tensors
    alone, by transformers' names or others that its key map knows."""

    file: Path
    files: Files
    entries: Mapping[str, Any]

    def __str__(self) -> str:
        return str(self.file)


ModelSource: TypeAlias = Path | StoredModel
"""A folder in transformers' layout, or a model in a file."""


def load_transformers_folder(
    folder: Path, *, device: torch.device, dtype: torch.dtype, attention: AttentionSelector
) -> tuple[LanguageModel, TextTokenizer]:
    """The model and the tokenizer of a folder that holds a config.json, safetensors weights and tokenizer files.

    Raises:
        FileNotFoundError: a file or a shard of the weights is missing.
        ValueError: an unknown architecture, weights that do not fit the config, or a tokenizer with more ids than the
            model has embeddings for.
    """
    config = model_config(folder)
    check_config_sizes(folder, read_checkpoint(component_weights(folder)).values())
    tokenizer = load_text_tokenizer(folder)
    num_ids = 1 + max(tokenizer.raw.get_vocab().values(), default=-1)  # some vocabularies have gaps
    if num_ids > config.vocab_size:
        raise ValueError(
            f"{folder}: the tokenizer has {num_ids} ids, but the model has embeddings for"
            f" {config.vocab_size} only; they do not belong together"
        )
    return load_transformers_model(folder, device=device, dtype=dtype, attention=attention), tokenizer


def load_transformers_model(
    folder: Path, *, device: torch.device, dtype: torch.dtype, attention: AttentionSelector
) -> LanguageModel:
    """The model alone. Errors as for `load_transformers_folder`."""
    config, files = model_config(folder), component_weights(folder)
    if config.tie_embeddings and not _head_is_tied(read_checkpoint(files)):
        config = dataclasses.replace(config, tie_embeddings=False)
    key_map = family_of(read_entries(folder)).key_map(config)
    model = build_on_meta(lambda: LanguageModel(config, attention=attention))
    load_weights(model, files, key_map, dtype=dtype, device=device)
    return model.requires_grad_(False).eval()


def load_headless_model(
    source: ModelSource,
    *,
    blocks: int,
    device: torch.device | str,
    dtype: torch.dtype,
    attention: AttentionSelector,
    variant: str | None = None,
) -> tuple[LanguageModel, StoredWeights | None]:
    """The first `blocks` blocks (at least one) of a model, to read its states: the rest is not loaded. On the
    meta device, with where the weights lie. `variant`, such as "fp16", picks one of several copies of the weights.

    Errors as for `load_transformers_folder`, and ValueError for more blocks than there are.
    """
    config, files = model_config(source), model_weights(source, variant)
    if not 0 <= blocks <= config.layers:
        raise ValueError(f"{source}: layer {blocks} is to be read; this model has layers 0 to {config.layers}")
    kept = max(blocks, 1)
    part = dataclasses.replace(config, layers=kept, sliding=config.sliding[:kept])

    def build() -> LanguageModel:
        model = LanguageModel(part, attention=attention)
        model.head = NoHead()
        return model

    model = build_on_meta(build)
    stored = filled(model, files, headless_key_map(source, kept), dtype=dtype, device=device)
    return model.requires_grad_(False).eval(), stored


def headless_key_map(source: ModelSource, blocks: int) -> KeyMap:
    """The names of the first blocks of a model, which leaves out all others and the head."""
    config = model_config(source)
    names = family_of(read_entries(source)).key_map(dataclasses.replace(config, tie_embeddings=True))
    return _without_blocks(names, range(blocks, config.layers))


def head_copies(files: Files) -> dict[str, str]:
    """The name of a head that equals the embeddings, with their name; nothing where there is none."""
    tensors = read_checkpoint(files)
    head = next((name for name in tensors if name.endswith(HEAD)), None)
    embedding = next((name for name in tensors if name.endswith(_EMBEDDING)), None)
    if head is None or embedding is None or not are_equal(tensors[head], tensors[embedding]):
        return {}
    return {head: embedding}


def _without_blocks(names: KeyMap, blocks: range) -> KeyMap:
    """A key map that leaves out the weights of some blocks, whatever stands before their names."""
    drops = tuple(f"{stem}layers.{i}.{{rest*}}" for i in blocks for stem in ("{stem*}.", ""))
    layouts = (dataclasses.replace(layout, drops=layout.drops + drops) for layout in names.layouts)
    return KeyMap(tuple(layouts))


def read_entries(source: ModelSource) -> Mapping[str, Any]:
    """The entries of a model's config.json, or what stands for them.

    Raises:
        FileNotFoundError: there is none. ValueError: it is not a JSON object.
    """
    if isinstance(source, StoredModel):
        return source.entries
    path = source / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; a model's folder in transformers' layout holds one")
    return json_object(path)


def model_weights(source: ModelSource, variant: str | None = None) -> Files:
    """What holds a model's weights. Errors as for `component_weights`."""
    return source.files if isinstance(source, StoredModel) else component_weights(source, variant)


def config_place(source: ModelSource) -> Path:
    """Where a model's config is, for messages."""
    return source.file if isinstance(source, StoredModel) else source / "config.json"


def model_config(source: ModelSource) -> LanguageModelConfig:
    """The sizes of a model. Errors as for `load_transformers_folder`."""
    entries, place = read_entries(source), config_place(source)
    refuse_quantised_entries(place.parent, entries)
    with naming(place):
        return family_of(entries).config(entries)


def _head_is_tied(tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether a checkpoint of tied embeddings has no head, or one that equals the embeddings."""
    head = next((each for name, each in tensors.items() if name.endswith(HEAD)), None)
    embedding = next((each for name, each in tensors.items() if name.endswith(_EMBEDDING)), None)
    if head is None or embedding is None:
        return True
    return are_equal(head, embedding)


def resolve_source(
    source: str | Path, *, revision: str | None = None, token: str | None = None, local_files_only: bool = False
) -> Path:
    """Where a model lies: `source` itself where it is a folder or a .gguf file, else the local copy of a hub id
    ("owner/name"), which is downloaded where needed. The size is told on the standard error output first.

    Raises:
        FileNotFoundError: no such folder or file, or nothing downloaded yet and no network allowed or there.
        ValueError: a file of another kind; a repository that is not there or holds no model that can be read.
    """
    if source == "":
        raise ValueError("the source is ''; it must be a folder, a .gguf file or a hub id such as 'owner/name'")
    try:
        path = Path(source).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # a name that is too long, a user's home that is not there
        raise FileNotFoundError(f"no folder or .gguf file {str(source)!r}: {error}") from error
    if is_folder:
        return path
    if is_file:
        if path.suffix.lower() != ".gguf":
            raise ValueError(f"cannot load {str(source)!r}: a language model is a folder, a .gguf file or a hub id")
        return path
    if isinstance(source, Path) or not is_hub_id(source):
        raise FileNotFoundError(f"no folder or .gguf file {str(source)!r}, and it is not a hub id such as 'owner/name'")
    return hub_folder(
        source,
        lambda listing: _wanted_files(listing.names, source),
        revision=revision,
        token=token,
        local_files_only=local_files_only,
    )


def _wanted_files(names: frozenset[str], repository: str) -> set[str]:
    """The files of a repository that loading reads."""
    weights = {name for name in names if "/" not in name and name.endswith(".safetensors")}
    named = {name for name in weights if name.startswith("model")}
    weights = named or weights
    if "config.json" not in names or not weights:
        missing = "config.json" if "config.json" not in names else "safetensors weights"
        raise ValueError(f"cannot load {repository!r} from the Hugging Face Hub: it holds no {missing}")
    return {*weights, *names.intersection((*_SMALL_FILES, _INDEX))}
