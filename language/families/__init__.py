"""The families of language models: each a config reader and a key map."""

from collections.abc import Mapping
from typing import Any, cast

from . import gemma3, llama, mistral, mistral3, qwen2, qwen2_5_vl, qwen3, qwen3_moe
from .base import Family

__all__ = ["FAMILIES", "Family", "family_of"]

FAMILIES = (
    llama.FAMILY,
    qwen2.FAMILY,
    qwen2_5_vl.FAMILY,
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
    mistral.FAMILY,
    mistral3.FAMILY,
    gemma3.FAMILY,
)


def family_of(entries: Mapping[str, Any]) -> Family:
    """The family of a transformers config: by its `architectures`, or by its `model_type` where it names none.

    Raises:
        ValueError: none that is known; the message gives what was found and what is known.
    """
    found: object = entries.get("architectures") or []
    architectures = [str(name) for name in cast(list[object], found)] if isinstance(found, list) else [str(found)]
    for family in FAMILIES:
        if any(name in family.architectures for name in architectures):
            return family
        if not architectures and entries.get("model_type") in family.model_types:
            return family
    what = f"architecture {', '.join(architectures)}" if architectures else f"model_type {entries.get('model_type')!r}"
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise ValueError(f"the config's {what} is not a known language model; known are {known}")
