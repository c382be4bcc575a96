"""Llama 2 and 3, SmolLM2 and others of the same architecture (Touvron et al. 2023)."""

from collections.abc import Mapping
from typing import Any

from ..config import LanguageModelConfig
from .base import Entries, Family, plain_config
from .keys import transformers_key_map

ARCHITECTURES = ("LlamaForCausalLM",)
MODEL_TYPES = ("llama",)


def config(entries: Mapping[str, Any]) -> LanguageModelConfig:
    """The config of transformers' `LlamaConfig` entries."""
    given = Entries(entries)
    given.refuse("attention_bias", "mlp_bias")
    return plain_config(given)


FAMILY = Family(
    name="llama",
    architectures=ARCHITECTURES,
    model_types=MODEL_TYPES,
    config=config,
    key_map=transformers_key_map,
)
