"""diffusers' configs: reading one, what kinds its entries must be of, and making a class of diffusers with it."""

import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from .json_file import json_object
from .naming import naming

Config = TypeVar("Config")
Made = TypeVar("Made")
Kind = tuple[str, Callable[[object], bool]]
"""What an entry must be, in words, and whether a value is that."""


def read_config(folder: Path, what: str, parse: Callable[[Mapping[str, object]], Config]) -> Config:
    """What `parse` makes of the config.json of a folder in diffusers' layout, of `what` ("an autoencoder").

    Raises:
        FileNotFoundError: it has none. ValueError: it is damaged, or `parse` refuses it.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; {what}'s folder in diffusers' layout holds one")
    entries = json_object(path)
    with naming(path):
        return parse(entries)


def made(name: str, make: Callable[[], Made]) -> Made:
    """What `make` gives, somebody else's class `name` called with a config.

    Raises:
        ValueError: it fails in one of the ways of sizes that do not fit each other.
    """
    try:
        return make()
    except (ValueError, TypeError, RuntimeError, ZeroDivisionError, IndexError, AssertionError) as error:
        raise ValueError(f"no {name} can be made of this config: {error}") from error


def known_entries(
    entries: Mapping[str, object],
    name: str,
    kinds: Mapping[str, Kind],
    *,
    skipped: Collection[str] = (),
    may_be_null: Collection[str] = (),
) -> dict[str, Any]:
    """The entries of diffusers' class `name`, lists as tuples, without those that begin with `_` or are `skipped`, and
    unknown ones that are null.

    Raises:
        ValueError: of another class, or an entry that `kinds` does not know or that is of another kind.
    """
    if entries.get("_class_name") != name:
        raise ValueError(f"the config's _class_name is {entries.get('_class_name')!r}; this one is {name!r}")
    taken = {key: value for key, value in entries.items() if not key.startswith("_") and key not in skipped}
    for key, value in taken.items():
        if key not in kinds and value is not None:
            raise ValueError(f"the config's {key} is {value!r}; known entries are {', '.join(kinds)}")
    known = {key: value for key, value in taken.items() if key in kinds}
    return {key: checked(key, value, kinds, may_be_null=may_be_null) for key, value in known.items()}


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


def listed(config: object) -> dict[str, Any]:
    """The fields of a config, tuples as lists: as a config.json has them."""
    return {name: list(each) if isinstance(each, tuple) else each for name, each in vars(config).items()}


def is_size(value: object) -> bool:
    """A whole number over 0."""
    return type(value) is int and value > 0


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(cast(float, value))


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_list(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and value != [] and all(map(fits, cast(list[object], value)))


SIZE: Kind = ("a whole number over 0", is_size)
SIZES: Kind = ("a list of whole numbers over 0", _is_list(is_size))
NUMBER: Kind = ("a number", _is_number)
NUMBERS: Kind = ("a list of numbers", _is_list(_is_number))
POSITIVE: Kind = ("a number over 0", lambda value: _is_number(value) and cast(float, value) > 0)
FLAG: Kind = ("true or false", _is_flag)
FLAGS: Kind = ("a list of true and false", _is_list(_is_flag))
WORD: Kind = ("a word", lambda value: isinstance(value, str))
