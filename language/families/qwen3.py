"""Qwen3: queries and keys are normalised, there are no biases (Qwen team 2025)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..config import LanguageModelConfig
from .base import Entries, Family, plain_config
from .keys import transformers_key_map
from .qwen2 import with_upper_windows

ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3Model")
MODEL_TYPES = ("qwen3",)


def config(entries: Mapping[str, Any]) -> LanguageModelConfig:
    """The config of transformers' `Qwen3Config` entries."""
    given = Entries({"head_dim": 128} | dict(entries))
    given.refuse("attention_bias")
    return with_upper_windows(dataclasses.replace(plain_config(given), qk_norm=True), given)


FAMILY = Family(
    name="qwen3",
    architectures=ARCHITECTURES,
    model_types=MODEL_TYPES,
    config=config,
    key_map=transformers_key_map,
)
