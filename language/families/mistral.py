"""Mistral 7B and its descendants: Llama with sliding windows in the first version (Jiang et al. 2023)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..config import LanguageModelConfig
from .base import Entries, Family, plain_config, sliding_layers
from .keys import transformers_key_map

ARCHITECTURES = ("MistralForCausalLM",)
MODEL_TYPES = ("mistral",)


def config(entries: Mapping[str, Any]) -> LanguageModelConfig:
    """The config of transformers' `MistralConfig` entries."""
    given = Entries(entries)
    plain, window = plain_config(given), given.optional_size("sliding_window", 4096)
    sliding = sliding_layers(given, plain.layers) if window is not None else None
    return dataclasses.replace(plain, window=window, sliding=sliding or ())


FAMILY = Family(
    name="mistral",
    architectures=ARCHITECTURES,
    model_types=MODEL_TYPES,
    config=config,
    key_map=transformers_key_map,
)
