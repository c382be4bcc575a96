"""Reading the entries of diffusers' transformer/config.json."""

import math
from collections.abc import Mapping
from typing import Any, TypeVar, cast

FILE = "transformer/config.json"
_Axes = TypeVar("_Axes", bound=tuple[int, ...])


def size(entries: Mapping[str, Any], name: str, default: int) -> int:
    """A whole number over 0. Raises ValueError for anything else."""
    value = entries.get(name, default)
    if type(value) is not int or value < 1:
        raise ValueError(f"{FILE}: {name} is {value!r}; it must be a whole number over 0")
    return value


def number(entries: Mapping[str, Any], name: str, default: float) -> float:
    """A finite number over 0. Raises ValueError for anything else."""
    value = entries.get(name, default)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{FILE}: {name} is {value!r}; it must be a number over 0")
    return float(value)


def switch(entries: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """True or false. Raises ValueError for anything else."""
    value = entries.get(name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{FILE}: {name} is {value!r}; it must be true or false")
    return value


def rotary_axes(entries: Mapping[str, Any], default: _Axes, head_width: int, name: str = "axes_dims_rope") -> _Axes:
    """As many even widths as `default` has, which make up a head. Raises ValueError for anything else."""
    value: object = entries.get(name, default)
    widths = tuple(cast(list[object], value)) if isinstance(value, list | tuple) else ()
    sizes = [width for width in widths if type(width) is int and width > 0 and width % 2 == 0]
    if len(sizes) != len(widths) or len(widths) != len(default) or sum(sizes) != head_width:
        wanted = f"{len(default)} even widths that add up to attention_head_dim {head_width}"
        raise ValueError(f"{FILE}: {name} is {value!r}; it must be {wanted}")
    return cast(_Axes, widths)
