"""Language models from folders in transformers' layout, and from the Hugging Face Hub."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..core.attention.base import AttentionSelector
from ..core.checkpoint import read_checkpoint
from ..core.component_files import component_weights, refuse_quantised_entries
from ..core.hub import hub_folder, is_hub_id
from ..core.json_file import json_object
from ..core.key_map import KeyMap
from ..core.loading import build_on_meta, load_weights
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
    folder: Path,
    *,
    blocks: int,
    device: torch.device | str,
    dtype: torch.dtype,
    attention: AttentionSelector,
    variant: str | None = None,
) -> tuple[LanguageModel, StoredWeights | None]:
    """The first `blocks` blocks (at least one) of a folder's model, to read its states: the rest is not loaded. On the
    meta device, with where the weights lie. `variant`, such as "fp16", picks one of several copies of the weights.

    Errors as for `load_transformers_folder`, and ValueError for more blocks than there are.
    """
    config, files = model_config(folder), component_weights(folder, variant)
    if not 0 <= blocks <= config.layers:
        raise ValueError(f"{folder}: layer {blocks} is to be read; this model has layers 0 to {config.layers}")
    kept = max(blocks, 1)
    names = family_of(read_entries(folder)).key_map(dataclasses.replace(config, tie_embeddings=True))
    part = dataclasses.replace(config, layers=kept, sliding=config.sliding[:kept])

    def build() -> LanguageModel:
        model = LanguageModel(part, attention=attention)
        model.head = NoHead()
        return model

    model = build_on_meta(build)
    stored = filled(model, files, _without_blocks(names, range(kept, config.layers)), dtype=dtype, device=device)
    return model.requires_grad_(False).eval(), stored


def _without_blocks(names: KeyMap, blocks: range) -> KeyMap:
    """A key map that leaves out the weights of some blocks, whatever stands before their names."""
    drops = tuple(f"{stem}layers.{i}.{{rest*}}" for i in blocks for stem in ("{stem*}.", ""))
    layouts = (dataclasses.replace(layout, drops=layout.drops + drops) for layout in names.layouts)
    return KeyMap(tuple(layouts))


def read_entries(folder: Path) -> Mapping[str, Any]:
    """The entries of a folder's config.json.

    Raises:
        FileNotFoundError: there is none. ValueError: it is not a JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; a model's folder in transformers' layout holds one")
    return json_object(path)


def model_config(folder: Path) -> LanguageModelConfig:
    """The sizes of a folder's model. Errors as for `load_transformers_folder`."""
    entries = read_entries(folder)
    refuse_quantised_entries(folder, entries)
    try:
        return family_of(entries).config(entries)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from None


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
