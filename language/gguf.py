"""Language models from GGUF files, as llama.cpp and its tools write them: model, tokenizer and chat template in one."""

from pathlib import Path

import torch

from ..core.attention.base import AttentionSelector
from ..core.config_sizes import check_sizes
from ..core.gguf_file import GGUFFile, gguf_shards
from ..core.loading import build_on_meta, load_weights
from .gguf_config import gguf_config, gguf_key_map
from .gguf_tokenizer import gguf_tokenizer
from .model import LanguageModel
from .tokenizer import TextTokenizer


def load_gguf(
    path: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    attention: AttentionSelector | None = None,
) -> tuple[LanguageModel, TextTokenizer]:
    """The language model of a `.gguf` file, its quantised weights as `dtype`, and its tokenizer.

    Any shard stands for a model in several files. In float32 the weights are what llama.cpp's formats stand for, bit by
    bit.

    Raises:
        FileNotFoundError: no such file, or a shard is missing.
        ValueError: not a whole GGUF file, an architecture or a tokenizer that is not known, a format that cannot be
            read, or tensors that do not fit the model.
    """
    shards = gguf_shards(path)
    files = [GGUFFile(shard) for shard in shards]
    tensors = {name: x for file in files for name, x in file.tensors.items()}
    check_sizes(path, files[0].metadata, tensors.values())
    config = gguf_config(files[0].metadata, tensors, path)
    tokenizer = gguf_tokenizer(files[0].metadata, path)
    if tokenizer.vocab_size > config.vocab_size:
        found = f"{tokenizer.vocab_size} tokens, but the model has {config.vocab_size} embeddings"
        raise ValueError(f"{path} is corrupted: its vocabulary has {found}")
    model = build_on_meta(lambda: LanguageModel(config, attention=attention))
    load_weights(model, shards, gguf_key_map(files[0].metadata, config), dtype=dtype, device=device)
    return model.requires_grad_(False).eval(), tokenizer
