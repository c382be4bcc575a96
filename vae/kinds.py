"""Kinds of entries in the configs of autoencoders, and what is said about one of another kind."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import cast

Kind = tuple[str, Callable[[object], bool]]
"""What an entry must be, in words, and whether a value is that."""


def checked(key: str, value: object, kinds: Mapping[str, Kind], *, may_be_null: Collection[str] = ()) -> object:
    """The value of the entry `key`, lists as tuples.

    Raises:
        ValueError: it is of another kind than `kinds` says.
    """
    what, fits = kinds[key]
    if value is None and key in may_be_null:
        return None
    if not fits(value):
        raise ValueError(f"the config's {key} is {value!r}; it must be {what}")
    return tuple(cast(list[object], value)) if isinstance(value, list) else value


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(cast(float, value))


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_list(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and value != [] and all(map(fits, cast(list[object], value)))


SIZE: Kind = ("a whole number over 0", _is_size)
SIZES: Kind = ("a list of whole numbers over 0", _is_list(_is_size))
NUMBER: Kind = ("a number", _is_number)
NUMBERS: Kind = ("a list of numbers", _is_list(_is_number))
POSITIVE: Kind = ("a number over 0", lambda value: _is_number(value) and cast(float, value) > 0)
FLAG: Kind = ("true or false", _is_flag)
FLAGS: Kind = ("a list of true and false", _is_list(_is_flag))
WORD: Kind = ("a word", lambda value: isinstance(value, str))
