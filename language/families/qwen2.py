"""Qwen2 and Qwen2.5: biases on queries, keys and values (Yang et al. 2024)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..config import LanguageModelConfig
from .base import Entries, Family, plain_config, sliding_layers
from .keys import transformers_key_map

ARCHITECTURES = ("Qwen2ForCausalLM",)
MODEL_TYPES = ("qwen2",)


def config(entries: Mapping[str, Any]) -> LanguageModelConfig:
    """The config of transformers' `Qwen2Config` entries."""
    given = Entries(entries)
    return with_upper_windows(dataclasses.replace(plain_config(given), qkv_bias=True), given)


def with_upper_windows(plain: LanguageModelConfig, given: Entries) -> LanguageModelConfig:
    """With windows in the layers that `layer_types` names, or else from `max_window_layers` on, if they are used."""
    window = given.optional_size("sliding_window", 4096) if given.flag("use_sliding_window", False) else None
    if window is None:
        return plain
    first: object = given.values.get("max_window_layers", 28)
    if type(first) is not int:
        raise ValueError(f"the config's max_window_layers is {first!r}; it must be a whole number")
    sliding = sliding_layers(given, plain.layers) or tuple(i >= first for i in range(plain.layers))
    return dataclasses.replace(plain, window=window, sliding=sliding)


FAMILY = Family(
    name="qwen2",
    architectures=ARCHITECTURES,
    model_types=MODEL_TYPES,
    config=config,
    key_map=transformers_key_map,
)
