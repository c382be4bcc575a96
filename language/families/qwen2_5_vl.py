"""Qwen2.5-VL, the text model: Qwen2.5 with positions of three axes, which for text alone are one (Bai et al. 2025)."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ..config import LanguageModelConfig
from . import qwen2
from .base import Family, text_entries
from .keys import seeing_key_map

ARCHITECTURES = ("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLTextModel")
MODEL_TYPES = ("qwen2_5_vl", "qwen2_5_vl_text")

_DEFAULTS = {
    "vocab_size": 152064,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768,
    "max_window_layers": 80,
    "rope_theta": 1_000_000.0,
}
_SECTIONS = (16, 24, 24)


def config(entries: Mapping[str, Any]) -> LanguageModelConfig:
    """The config of the text part of transformers' `Qwen2_5_VLConfig` entries, old (all in one) or new."""
    given = _DEFAULTS | text_entries(entries)
    rotary: object = given.pop("rope_scaling", None) or given.pop("rope_parameters", None) or {}
    if not isinstance(rotary, Mapping):
        raise ValueError(f"the config's rotary parameters are {rotary!r}; they must be an object")
    plain = dict(cast(Mapping[str, Any], rotary))
    sections = plain.pop("mrope_section", _SECTIONS)
    if plain.get("rope_type", plain.get("type")) == "mrope":
        plain = {name: value for name, value in plain.items() if name not in ("rope_type", "type")}
    text = qwen2.config(given | {"rope_parameters": plain})
    return dataclasses.replace(text, rope_sections=_checked(sections))


def _checked(sections: object) -> tuple[int, ...]:
    numbers = cast(Sequence[object], sections) if isinstance(sections, Sequence) else ()
    if len(numbers) != 3 or any(type(each) is not int or each < 1 for each in numbers):
        raise ValueError(f"the config's mrope_section is {sections!r}; it must be three whole numbers over 0")
    return tuple(cast(Sequence[int], numbers))


FAMILY = Family(
    name="qwen2_5_vl",
    architectures=ARCHITECTURES,
    model_types=MODEL_TYPES,
    config=config,
    key_map=seeing_key_map,
)
