"""Tiny random CLIP and T5 text encoders, and tokenizers for them that know a few words, in transformers' layout."""

import json
from pathlib import Path
from typing import Any

import torch

WORDS = ("a", "fox", "photo", "of", "red", "cat", "on", "the", "grass", "and", "two", "dogs", "river", "old", "boat")
BEGIN, END = "<|startoftext|>", "<|endoftext|>"
PROMPTS = ["a photo of a Red fox, on the grass", "", "cat"]
LONG = " ".join(WORDS[i % 15] for i in range(100))
NUM_LETTERS = 256


def clip_tokenizer(pad: str = END) -> Any:
    """CLIP's kind: byte-level pairs with marks at words' ends; every word of `WORDS` is one token."""
    from transformers import CLIPTokenizer

    vocab, merges = _clip_vocabulary()
    return CLIPTokenizer(vocab, merges, pad_token=pad, model_max_length=77)


def save_clip_tokenizer(folder: Path, pad: str = END) -> Path:
    """The files of the hub's folders, which have no tokenizer.json."""
    folder.mkdir(parents=True)
    vocab, merges = _clip_vocabulary()
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    lines = "\n".join(("#version: 0.2", *(" ".join(merge) for merge in merges)))
    (folder / "merges.txt").write_text(lines + "\n", encoding="utf-8")
    marks = {"bos_token": BEGIN, "eos_token": END, "unk_token": END, "pad_token": pad}
    settings = {**marks, "model_max_length": 77, "tokenizer_class": "CLIPTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def t5_tokenizer() -> Any:
    """T5's kind: whole words, else letters."""
    from transformers import T5Tokenizer

    letters = [(letter, -6.0) for letter in "abcdefghijklmnopqrstuvwxyzR,.:()"]
    words = [("▁" + word, -3.0) for word in WORDS]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -4.0), *words, *letters]
    extra = [(f"<extra_id_{i}>", 0.0) for i in (1, 0)]
    return T5Tokenizer([*pieces, *extra], extra_ids=2, model_max_length=512)


def clip_model(projection: bool, **sizes: Any) -> Any:
    """A text model of three layers of which every weight matters."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    vocab, _ = _clip_vocabulary()
    settings: dict[str, Any] = {
        "vocab_size": len(vocab),
        "hidden_size": 32,
        "intermediate_size": 44,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 77,
        "projection_dim": 24,
        "hidden_act": "gelu",
        "layer_norm_eps": 3e-3,
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,  # as the originals say; transformers then pools at the highest id
    }
    config = CLIPTextConfig(**{**settings, **sizes})
    return randomised((CLIPTextModelWithProjection if projection else CLIPTextModel)(config))


def t5_model(umt5: bool = False, **sizes: Any) -> Any:
    """An encoder of three layers of which every weight matters."""
    from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

    settings: dict[str, Any] = {
        "vocab_size": len(t5_tokenizer()) + 3,
        "d_model": 32,
        "d_kv": 6,
        "d_ff": 40,
        "num_heads": 4,
        "num_layers": 3,
        "relative_attention_num_buckets": 10,
        "relative_attention_max_distance": 21,
        "feed_forward_proj": "gated-gelu",
        "layer_norm_epsilon": 3e-3,
        "tie_word_embeddings": False,
    }
    config = (UMT5Config if umt5 else T5Config)(**{**settings, **sizes})
    return randomised((UMT5EncoderModel if umt5 else T5EncoderModel)(config))


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    """Weights large enough that every layer, bias and position matters."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else noise * parameter.shape[-1] ** -0.5)
    return model.requires_grad_(False).eval()


def _clip_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Ids and merges. Bytes come in GPT-2's order, so that "!" is 0."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(NUM_LETTERS - len(printable))]
    merges: dict[tuple[str, str], None] = {}
    for word in WORDS:
        symbols = [*word[:-1], word[-1] + "</w>"]
        while len(symbols) > 1:
            merges[symbols[0], symbols[1]] = None
            symbols[:2] = [symbols[0] + symbols[1]]
    tokens = [*letters, *(letter + "</w>" for letter in letters), *("".join(pair) for pair in merges), BEGIN, END]
    return {token: index for index, token in enumerate(dict.fromkeys(tokens))}, list(merges)
