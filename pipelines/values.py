"""What kind of thing a user's value is."""

import math
from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor


def plain(value: object) -> object:
    """Numbers of torch and numpy, and lists of numbers, as Python's own (a copy); anything else as it is."""
    import numpy

    if isinstance(value, Tensor | numpy.ndarray | numpy.generic):
        value = value.tolist()
    return [plain(item) for item in cast(Sequence[object], value)] if isinstance(value, list | tuple) else value


def is_int(value: object) -> bool:
    """A whole number, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """A finite number, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_instance(value: object, kind: type) -> bool:
    """Whether it is an object of that kind, not the class (which has the same attributes, so that protocols match)."""
    return isinstance(value, kind) and not isinstance(value, type)


def kind(value: object) -> str:
    """Its type, and what a tensor holds, in words."""
    return f"tensor {tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
