"""The rotary embedding in transformers configs: `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""

import math
import sys
from collections.abc import Mapping
from typing import Any, cast

from ...core.rotary import RotaryScaling


def read_rotary(entries: Mapping[str, Any], *, theta: float, context: int) -> tuple[float, RotaryScaling | None]:
    """Base and scaling of a config's entries; `theta` and `context` (the model's length) where they are silent.

    Raises:
        ValueError: a kind of scaling that is not supported, or one without its numbers.
    """
    found: object = entries.get("rope_parameters") or entries.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"the config's rotary parameters are {found!r}; they must be an object")
    given = cast(Mapping[str, Any], found)
    base = _number(given, "rope_theta", _number(entries, "rope_theta", theta))
    part = _number(given, "partial_rotary_factor", _number(entries, "partial_rotary_factor", 1.0))
    if part != 1:
        raise ValueError(f"the config's partial_rotary_factor is {part}; only 1 is supported")
    kind: object = given.get("rope_type", given.get("type", "default"))
    if kind in ("default", None):
        return base, None
    if kind == "linear":
        return base, RotaryScaling(kind="linear", factor=_number(given, "factor"))
    original = "original_max_position_embeddings"
    trained = int(_number(given, original, _number(entries, original, context)))
    if kind == "llama3":
        return base, _llama3(given, trained)
    if kind == "yarn":
        return base, _yarn(given, trained, context)
    raise ValueError(f"the config's rope_type is {kind!r}; supported are default, linear, llama3, yarn")


def _llama3(given: Mapping[str, Any], trained: int) -> RotaryScaling:
    return RotaryScaling(
        kind="llama3",
        factor=_number(given, "factor"),
        original_context=trained,
        low_frequency=_number(given, "low_freq_factor"),
        high_frequency=_number(given, "high_freq_factor"),
    )


def _yarn(given: Mapping[str, Any], trained: int, context: int) -> RotaryScaling:
    factor = _number(given, "factor", context / trained)
    attention_factor: float | None = None
    if given.get("attention_factor") is not None:
        attention_factor = _number(given, "attention_factor")
    elif given.get("mscale") and given.get("mscale_all_dim"):
        attention_factor = _gain(factor, _number(given, "mscale")) / _gain(factor, _number(given, "mscale_all_dim"))
    return RotaryScaling(
        kind="yarn",
        factor=factor,
        original_context=trained,
        beta_fast=_number(given, "beta_fast", 32.0),
        beta_slow=_number(given, "beta_slow", 1.0),
        truncate=given.get("truncate", True) is not False,
        attention_factor=attention_factor,
    )


def _gain(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _number(entries: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value: object = entries.get(name)
    if value is None:
        value = default
    return positive(value, f"the rotary embedding's {name}")


def positive(value: object, what: str) -> float:
    """A finite number over 0.

    Raises:
        ValueError: anything else; the message begins with `what`.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise ValueError(f"{what} is {value!r}; it must be a number over 0")
    return float(value)
