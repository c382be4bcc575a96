"""Qwen3-MoE: Qwen3 with experts instead of most MLPs (Qwen team 2025)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from ...core.key_map import KeyMap
from ...core.moe import ExpertsConfig
from ..config import LanguageModelConfig
from .base import Entries, Family, plain_config
from .keys import transformers_key_map

ARCHITECTURES = ("Qwen3MoeForCausalLM",)
MODEL_TYPES = ("qwen3_moe",)


def config(entries: Mapping[str, Any]) -> LanguageModelConfig:
    """The config of transformers' `Qwen3MoeConfig` entries."""
    given = Entries(entries)
    given.refuse("attention_bias")
    plain = plain_config(given)
    count = given.size("num_experts" if "num_experts" in entries else "num_local_experts", 128)
    experts = ExpertsConfig(
        count=count,
        active=given.size("num_experts_per_tok", 8),
        hidden=given.size("moe_intermediate_size", 768),
        normalise=given.flag("norm_topk_prob", False),
        dense_layers=_dense_layers(given, plain.layers),
    )
    window = given.optional_size("sliding_window", 4096) if given.flag("use_sliding_window", False) else None
    return dataclasses.replace(plain, qk_norm=True, experts=experts, window=window)


def _dense_layers(given: Entries, layers: int) -> tuple[int, ...]:
    """The layers of `mlp_only_layers`, and all but each `decoder_sparse_step`-th."""
    named: object = given.values.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(type(each) is int for each in cast(list[object], named)):
        raise ValueError(f"the config's mlp_only_layers is {named!r}; it must be a list of layers")
    step = given.size("decoder_sparse_step", 1)
    return tuple(i for i in range(layers) if i in named or (i + 1) % step)


def key_map(config: LanguageModelConfig) -> KeyMap:
    """The names of the whole model (a rule per expert makes each further spelling dear)."""
    return transformers_key_map(config, stems=("model.",))


FAMILY = Family(
    name="qwen3_moe",
    architectures=ARCHITECTURES,
    model_types=MODEL_TYPES,
    config=config,
    key_map=key_map,
)
