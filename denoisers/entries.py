"""Reading the entries of diffusers' transformer/config.json."""

from collections.abc import Mapping
from typing import Any, TypeVar, cast

from ..core.diffusers_config import FLAG, POSITIVE, SIZE, Kind

FILE = "transformer/config.json"
_Axes = TypeVar("_Axes", bound=tuple[int, ...])


def size(entries: Mapping[str, Any], name: str, default: int) -> int:
    """A whole number over 0. Raises ValueError for anything else."""
    return int(_of_kind(entries, name, default, SIZE))


def number(entries: Mapping[str, Any], name: str, default: float) -> float:
    """A finite number over 0. Raises ValueError for anything else."""
    return float(_of_kind(entries, name, default, POSITIVE))


def switch(entries: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """True or false. Raises ValueError for anything else."""
    return bool(_of_kind(entries, name, default, FLAG))


def check_fixed(
    entries: Mapping[str, Any], fixed: Mapping[str, object], default: Mapping[str, object] | None = None
) -> None:
    """Makes sure that entries are as in all models that can be used; one that is missing is as in `default`, or else
    as it must be. ValueError otherwise."""
    for name, wanted in fixed.items():
        value: object = entries.get(name, (default or {}).get(name, wanted))
        value = [*cast(tuple[object, ...], value)] if isinstance(value, tuple) else value
        if value != wanted:
            raise ValueError(f"{FILE}: {name} is {value!r}; only models where it is {wanted!r} can be used")


def _of_kind(entries: Mapping[str, Any], name: str, default: float, kind: Kind) -> Any:
    value, (what, fits) = entries.get(name, default), kind
    if not fits(value):
        raise ValueError(f"{FILE}: {name} is {value!r}; it must be {what}")
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
