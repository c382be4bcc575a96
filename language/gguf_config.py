"""What a GGUF file says of a language model: its config, and how llama.cpp names its tensors.

The meaning of the metadata is that of llama.cpp (`llama-model.cpp`) and of its `convert_hf_to_gguf.py`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ..core.gguf_file import GGUFFile
from ..core.key_map import KeyMap, Layout, Operation, Part, Reshape, RowPermutation, Rows, Rule
from ..core.moe import ExpertsConfig
from ..core.rotary import RotaryScaling
from ..core.stored_tensor import StoredTensor
from .config import LanguageModelConfig

_GEMMA3_27B_LAYERS = 62
_GEMMA3_PATTERN = 6


def gguf_config(metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor], path: Path) -> LanguageModelConfig:
    """The model's config.

    Raises:
        ValueError: an architecture that is not known, an entry that is missing or senseless, or a model that asks for
            what these blocks do not do.
    """
    name: object = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise ValueError(f"{path}: the architecture {name!r} is not known; known are {', '.join(_ARCHITECTURES)}")
    return _ARCHITECTURES[name](_Entries(metadata, tensors, path, name))


def gguf_key_map(metadata: Mapping[str, Any], config: LanguageModelConfig) -> KeyMap:
    """llama.cpp's names for a model of this config."""
    pairs = RowPermutation((-1, config.head_width // 2, 2), (0, 2, 1))
    turn = (pairs,) if metadata["general.architecture"] == "llama" else ()
    return KeyMap((Layout("llama.cpp", (*_rules(turn), *_expert_rules(config)), drops=("rope_freqs.weight",)),))


def _rules(turn: tuple[Operation, ...]) -> tuple[Rule, ...]:
    """`turn` takes the rows of queries and keys from llama.cpp's neighbouring rotary pairs to halves."""
    qkv = (Part("blk.{i}.attn_q.{leaf}", turn), Part("blk.{i}.attn_k.{leaf}", turn), "blk.{i}.attn_v.{leaf}")
    return (
        Rule("token_embd.weight", "embedding.weight"),
        Rule(qkv, "blocks.{i}.attention.qkv.{leaf}"),
        Rule(("blk.{i}.ffn_gate.weight", "blk.{i}.ffn_up.weight"), "blocks.{i}.mlp.gate_up.weight"),
        *(Rule(f"blk.{{i}}.{theirs}.weight", f"blocks.{{i}}.{ours}.weight") for theirs, ours in _BLOCK_NAMES.items()),
        Rule("output_norm.weight", "norm.weight"),
        Rule("output.weight", "head.weight"),
    )


_BLOCK_NAMES = {
    "attn_norm": "attention_norm",
    "attn_q_norm": "attention.query_norm",
    "attn_k_norm": "attention.key_norm",
    "attn_output": "attention.output",
    "post_attention_norm": "attention_post_norm",
    "ffn_norm": "mlp_norm",
    "ffn_gate_inp": "mlp.router",
    "ffn_down": "mlp.down",
    "post_ffw_norm": "mlp_post_norm",
}


def _expert_rules(config: LanguageModelConfig) -> tuple[Rule, ...]:
    """Stacks of gates and of ups are taken apart, so that each expert's two matrices lie together."""
    if config.experts is None:
        return ()
    parts = tuple(
        Part(f"blk.{{i}}.ffn_{name}_exps.weight", (Rows(n, n + 1), Reshape((config.experts.hidden, config.width))))
        for n in range(config.experts.count)
        for name in ("gate", "up")
    )
    down = (Reshape((config.experts.count * config.width, config.experts.hidden)),)
    return (
        Rule(parts, "blocks.{i}.mlp.gate_up"),
        Rule("blk.{i}.ffn_down_exps.weight", "blocks.{i}.mlp.down", down),
    )


@dataclass(frozen=True)
class _Entries:
    """The metadata of one file, each entry of the type asked for."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    path: Path
    architecture: str

    def size(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if type(value) is not int or value < 1:
            raise self.senseless(name, value, "a whole number over 0")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if type(value) not in (int, float) or not 0 < cast(float, value) < math.inf:
            raise self.senseless(name, value, "a number over 0")
        return float(cast(float, value))

    def word(self, name: str, default: str) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.senseless(name, value, "a word")
        return value

    def _value(self, name: str, default: object) -> object:
        value: object = self.metadata.get(f"{self.architecture}.{name}", default)
        if value is None:
            raise ValueError(f"{self.path} has no {self.architecture}.{name}")
        return value

    def senseless(self, name: str, value: object, allowed: str) -> ValueError:
        return ValueError(f"{self.path}: {self.architecture}.{name} is {value!r}; it must be {allowed}")

    def shape(self, tensor: str) -> tuple[int, ...]:
        if tensor not in self.tensors:
            raise ValueError(f"{self.path} has no tensor {tensor!r}")
        return self.tensors[tensor].shape


def _plain(entries: _Entries) -> LanguageModelConfig:
    """What all architectures share."""
    if entries.architecture != "qwen3moe" and f"{entries.architecture}.expert_count" in entries.metadata:
        raise ValueError(f"{entries.path}: {entries.architecture} models with experts are not supported")
    width, heads = entries.size("embedding_length"), entries.size("attention.head_count")
    head_width = entries.size("attention.key_length", max(1, width // heads))
    for name in ("attention.value_length", "rope.dimension_count"):
        if entries.size(name, head_width) != head_width:
            raise entries.senseless(name, entries.size(name), f"the width of a head, {head_width}")
    return LanguageModelConfig(
        vocab_size=entries.shape("token_embd.weight")[0],
        width=width,
        layers=entries.size("block_count"),
        heads=heads,
        kv_heads=entries.size("attention.head_count_kv", heads),
        head_width=head_width,
        hidden=entries.size("feed_forward_length"),
        norm_eps=entries.number("attention.layer_norm_rms_epsilon"),
        rope_theta=entries.number("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(entries),
        qk_norm="blk.0.attn_q_norm.weight" in entries.tensors,
        qkv_bias="blk.0.attn_q.bias" in entries.tensors,
        context_length=entries.size("context_length"),
        tie_embeddings="output.weight" not in entries.tensors,
    )


def _rope_scaling(entries: _Entries) -> RotaryScaling | None:
    kind = entries.word("rope.scaling.type", "none")
    if "rope_freqs.weight" in entries.tensors:  # Llama 3.1's scaling, written out
        tensor = entries.tensors["rope_freqs.weight"]
        divisors = GGUFFile(tensor.file).read("rope_freqs.weight").tolist()
        return RotaryScaling(kind="divisors", divisors=tuple(divisors))
    if kind == "none":
        return None
    if kind == "linear":
        return RotaryScaling(kind="linear", factor=entries.number("rope.scaling.factor"))
    if kind == "yarn":
        context = entries.size("rope.scaling.original_context_length", entries.size("context_length"))
        return RotaryScaling(kind="yarn", factor=entries.number("rope.scaling.factor"), original_context=context)
    raise entries.senseless("rope.scaling.type", kind, "none, linear or yarn")


def _qwen3_moe(entries: _Entries) -> LanguageModelConfig:
    count, hidden = entries.size("expert_count"), entries.shape("blk.0.ffn_gate_exps.weight")[1]
    experts = ExpertsConfig(count=count, active=entries.size("expert_used_count"), hidden=hidden, normalise=True)
    filled = {"qwen3moe.feed_forward_length": hidden, **entries.metadata}
    return dataclasses.replace(_plain(dataclasses.replace(entries, metadata=filled)), experts=experts)


def _gemma3(entries: _Entries) -> LanguageModelConfig:
    """Norms are stored with their offset of 1 already in."""
    plain = _plain(entries)
    is_27b = plain.layers == _GEMMA3_27B_LAYERS
    return dataclasses.replace(
        plain,
        sandwich=True,
        activation="gelu_tanh",
        attention_scale=(plain.width / plain.heads if is_27b else plain.head_width) ** -0.5,
        embedding_scale=plain.width**0.5,
        window=entries.size("attention.sliding_window"),
        sliding=tuple((i + 1) % _GEMMA3_PATTERN != 0 for i in range(plain.layers)),
        local_rope_theta=entries.number("rope.freq_base_swa", 10000.0),
    )


_ARCHITECTURES: dict[str, Callable[[_Entries], LanguageModelConfig]] = {
    "llama": _plain,
    "qwen2": _plain,
    "qwen3": _plain,
    "qwen3moe": _qwen3_moe,
    "gemma3": _gemma3,
}
"""By llama.cpp's names; Mistral models are "llama" there."""
