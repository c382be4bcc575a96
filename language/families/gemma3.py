"""Gemma 3, the text model: windows in most layers, norms on both sides of each sublayer (Gemma team 2025)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from ..config import LanguageModelConfig
from .base import Entries, Family, plain_config, sliding_layers, text_entries
from .keys import seeing_key_map
from .rotary import read_rotary

ARCHITECTURES = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
MODEL_TYPES = ("gemma3_text", "gemma3")

_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
}


def config(entries: Mapping[str, Any]) -> LanguageModelConfig:
    """The config of transformers' `Gemma3TextConfig` entries, or of the text part of `Gemma3Config` ones."""
    text = text_entries(entries)
    given = Entries(_DEFAULTS | {"hidden_act": text.get("hidden_activation", "gelu_pytorch_tanh")} | text)
    given.refuse("attention_bias", "final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention")
    everywhere, local = _rotary(text)
    plain = plain_config(Entries(dict(given.values) | everywhere), theta=1_000_000.0, tie_embeddings=True)
    local_theta, local_scaling = read_rotary(local, theta=10_000.0, context=plain.context_length)
    if local_scaling is not None:
        raise ValueError("the config scales the rotary embedding of sliding layers, which is not supported")
    pattern = given.optional_size("sliding_window_pattern", 6) or 6
    return dataclasses.replace(
        plain,
        qk_norm=True,
        sandwich=True,
        norm_offset=1.0,
        attention_scale=given.number("query_pre_attn_scalar", 256) ** -0.5,
        embedding_scale=plain.width**0.5,
        window=given.size("sliding_window", 4096),
        sliding=sliding_layers(given, plain.layers) or tuple((i + 1) % pattern != 0 for i in range(plain.layers)),
        local_rope_theta=local_theta,
    )


def _rotary(text: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entries for full layers and for sliding ones; the newer spelling has one object for each."""
    given: object = text.get("rope_parameters")
    both = dict(cast(Mapping[str, Any], given)) if isinstance(given, Mapping) else {}
    if both.keys() & {"full_attention", "sliding_attention"}:
        return (
            {"rope_parameters": both.get("full_attention")},
            {"rope_parameters": both.get("sliding_attention")},
        )
    local = text.get("rope_local_base_freq")
    return {}, {} if local is None else {"rope_theta": local}


FAMILY = Family(
    name="gemma3",
    architectures=ARCHITECTURES,
    model_types=MODEL_TYPES,
    config=config,
    key_map=seeing_key_map,
)
