"""Language models from folders in transformers' layout, and from the Hugging Face Hub."""

import dataclasses
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from ..core.attention.base import AttentionSelector
from ..core.checkpoint import read_checkpoint
from ..core.json_file import json_object
from ..core.loading import build_on_meta, load_weights
from ..core.stored_tensor import StoredTensor
from ..core.weight_source import are_equal
from .config import LanguageModelConfig
from .families import family_of
from .families.keys import HEAD
from .model import LanguageModel
from .tokenizer import TextTokenizer, load_text_tokenizer

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
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
    config = _model_config(folder)
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
    config, files = _model_config(folder), _weights(folder)
    if config.tie_embeddings and not _head_is_tied(read_checkpoint(files)):
        config = dataclasses.replace(config, tie_embeddings=False)
    key_map = family_of(read_entries(folder)).key_map(config)
    model = build_on_meta(lambda: LanguageModel(config, attention=attention))
    load_weights(model, files, key_map, dtype=dtype, device=device)
    return model.requires_grad_(False).eval()


def read_entries(folder: Path) -> Mapping[str, Any]:
    """The entries of a folder's config.json.

    Raises:
        FileNotFoundError: there is none. ValueError: it is not a JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; a model's folder in transformers' layout holds one")
    return json_object(path)


def _model_config(folder: Path) -> LanguageModelConfig:
    entries = read_entries(folder)
    method: object = entries.get("quantization_config")
    if isinstance(method, Mapping):
        kind = cast(Mapping[str, object], method).get("quant_method", "an unknown method")
        raise ValueError(f"{folder}: the weights are quantised ({kind}), which cannot be read; take the original ones")
    try:
        return family_of(entries).config(entries)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from None


def _weights(folder: Path) -> Path:
    """What holds the weights: repositories may hold a second copy under another name."""
    for name in (_INDEX, "model.safetensors"):
        if (folder / name).is_file():
            return folder / name
    pickled = sorted(file.name for file in folder.glob("*.bin"))
    if pickled and not any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder}: only pickled weights ({pickled[0]}), which are never loaded; convert them")
    return folder


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
    if isinstance(source, Path) or not _HUB_ID.fullmatch(source) or path.suffix in (".gguf", ".safetensors"):
        raise FileNotFoundError(f"no folder or .gguf file {str(source)!r}, and it is not a hub id such as 'owner/name'")
    if local_files_only:
        return _local_copy(source, revision, "local_files_only is set")
    return _downloaded(source, revision, token)


def _downloaded(repository: str, revision: str | None, token: str | None) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        info = HfApi(token=token).model_info(repository, revision=revision, files_metadata=True)
    except HfHubHTTPError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"cannot load {repository!r} from the Hugging Face Hub: {reason}") from error
    except Exception as error:  # every version of the client has its own errors for a network that is not there
        return _local_copy(repository, revision, f"the hub cannot be reached ({type(error).__name__})")
    files = _wanted_files({each.rfilename for each in info.siblings or ()}, repository)
    _tell_size(info, files)
    return Path(snapshot_download(repository, revision=info.sha, token=token, allow_patterns=sorted(files)))


def _local_copy(repository: str, revision: str | None, why: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise FileNotFoundError(f"{repository!r} is not downloaded yet, and {why}") from error


def _wanted_files(names: set[str], repository: str) -> set[str]:
    """The files of a repository that loading reads."""
    weights = {name for name in names if "/" not in name and name.endswith(".safetensors")}
    named = {name for name in weights if name.startswith("model")}
    weights = named or weights
    if "config.json" not in names or not weights:
        missing = "config.json" if "config.json" not in names else "safetensors weights"
        raise ValueError(f"cannot load {repository!r} from the Hugging Face Hub: it holds no {missing}")
    return weights | names.intersection((*_SMALL_FILES, _INDEX))


def _tell_size(info: "ModelInfo", files: set[str]) -> None:
    """States what is about to be downloaded, if anything is."""
    from huggingface_hub import try_to_load_from_cache

    absent = [
        each
        for each in info.siblings or ()
        if each.rfilename in files
        and not isinstance(try_to_load_from_cache(info.id, each.rfilename, revision=info.sha), str)
    ]
    if absent:
        size = sum(each.size or 0 for each in absent)
        print(f"downloading {info.id}: {len(absent)} files, {size / 1e9:.2f} GB", file=sys.stderr)
