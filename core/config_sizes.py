"""Whether the sizes that a config names can be those of the weights that it belongs to: huge ones would take all memory
as soon as a module is made of them, before any weight is missed."""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import cast

from .json_file import json_object
from .stored_tensor import StoredTensor

_NUMBERS = re.compile(r"(^|[_.])(layers|blocks|block_count|depth|experts|expert_count)(_|$)")
"""Entries that count parts with tensors of their own."""
_LENGTHS = re.compile("position|length|window|seq")
_FREE = re.compile("theta|token|seed")
"""Entries that are no sizes."""
SOME_PARTS = 1024
"""So many are let through whatever the weights show: they take no memory to speak of."""
_SOME_WIDTH, _MOST_POSITIONS = 2**20, 2**27


def check_config_sizes(folder: Path, tensors: Collection[StoredTensor]) -> None:
    """Makes sure that no whole number in the config.json of a folder, if it has one, is far larger than what its
    weights show: `check_sizes`, with the file's name in the message."""
    path = folder / "config.json"
    check_sizes(path, json_object(path) if path.is_file() else {}, tensors)


def check_sizes(place: Path, entries: Mapping[str, object], tensors: Collection[StoredTensor]) -> None:
    """Makes sure that whole numbers in the entries of `place`, of all depths, do not exceed what the weights show:
    layers and the like their number, all else their largest side. Small values are always let through, and lengths of
    texts up to more than any model has.

    Raises:
        ValueError: one that does; names the file, the entry, the value and what is allowed.
    """
    parts = max(SOME_PARTS, len(tensors))
    width = max(side for shape in ((_SOME_WIDTH,), *(tensor.shape for tensor in tensors)) for side in shape)
    for name, value in _whole_numbers("", entries):
        if _LENGTHS.search(name):
            most, why = _MOST_POSITIONS, "no model is made for more"
        elif _NUMBERS.search(name):
            most, why = parts, f"the weights are {len(tensors)} tensors"
        else:
            most, why = width, "no tensor of the weights has a longer side"
        if value > most:
            raise ValueError(f"{place}: {name} is {value}; it can be at most {most} here: {why}")


def _whole_numbers(name: str, value: object) -> Iterator[tuple[str, int]]:
    """Every one that may be a size, with the names that lead to it."""
    if _FREE.search(name):
        return
    if type(value) is int:
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in cast(Mapping[str, object], value).items():
            yield from _whole_numbers(f"{name}.{key}" if name else key, each)
    elif isinstance(value, list):
        for each in cast(list[object], value):
            yield from _whole_numbers(name, each)
