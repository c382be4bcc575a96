"""Mistral Small 3 with eyes: Mistral's text model inside a model that also sees (Mistral AI 2025)."""

from collections.abc import Mapping
from typing import Any

from ..config import LanguageModelConfig
from . import mistral
from .base import Family, text_entries
from .keys import seeing_key_map

ARCHITECTURES = ("Mistral3ForConditionalGeneration",)
MODEL_TYPES = ("mistral3",)


def config(entries: Mapping[str, Any]) -> LanguageModelConfig:
    """The config of the text part of transformers' `Mistral3Config` entries."""
    text = text_entries(entries)
    kind = text.get("model_type", "mistral")
    if kind != "mistral":
        raise ValueError(f"the config's text_config has the model_type {kind!r}; only 'mistral' is supported")
    tied = {"tie_word_embeddings": entries["tie_word_embeddings"]} if "tie_word_embeddings" in entries else {}
    return mistral.config(tied | text)


FAMILY = Family(
    name="mistral3",
    architectures=ARCHITECTURES,
    model_types=MODEL_TYPES,
    config=config,
    key_map=seeing_key_map,
)
