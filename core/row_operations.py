"""What a key map may do to a stored tensor: pick rows, permute rows, reshape. All are views; nothing is copied."""

from dataclasses import dataclass
from math import prod
from typing import Protocol, TypeAlias

from torch import Tensor

Shape: TypeAlias = tuple[int, ...]


class Operation(Protocol):
    """One step from a stored tensor to (a part of) a parameter."""

    def shape(self, shape: Shape) -> Shape:
        """The shape of the result, given the input's. Raises ValueError if the operation does not fit."""
        ...

    def view(self, x: Tensor) -> Tensor:
        """A view whose elements, read in order, are the result's; its own shape may differ from `shape`."""
        ...


@dataclass(frozen=True)
class Rows:
    """Rows start:stop, counted as in a Python slice."""

    start: int | None = None
    stop: int | None = None

    def shape(self, shape: Shape) -> Shape:
        """[R, ...] to [stop - start, ...]."""
        rows = _rows(shape, self)
        for bound in (self.start, self.stop):
            if bound is not None and abs(bound) > rows:
                raise ValueError(f"rows {self.start}:{self.stop} do not exist in a tensor of shape {list(shape)}")
        start, stop, _ = slice(self.start, self.stop).indices(rows)
        return (max(stop - start, 0), *shape[1:])

    def view(self, x: Tensor) -> Tensor:
        """`x[start:stop]`."""
        return x[self.start : self.stop]


@dataclass(frozen=True)
class Share:
    """Share `index` of the rows, cut into `count` equal ones: `Share(1, 3)` is k in q, k, v of equal heights."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"there is no share {self.index} of {self.count}")

    def shape(self, shape: Shape) -> Shape:
        """[R, ...] to [R / count, ...]."""
        rows = _rows(shape, self)
        if rows % self.count:
            raise ValueError(f"the rows of shape {list(shape)} cannot be cut into {self.count} equal shares")
        return (rows // self.count, *shape[1:])

    def view(self, x: Tensor) -> Tensor:
        """`x.chunk(count)[index]`."""
        return x.unflatten(0, (self.count, -1))[self.index]


@dataclass(frozen=True)
class RowPermutation:
    """Rows seen as a grid `split` whose axes are put into `order`.

    `RowPermutation((-1, head_width // 2, 2), (0, 2, 1))` takes rotary pairs from interleaved to half-split order.
    """

    split: Shape
    order: tuple[int, ...]

    def __post_init__(self) -> None:
        if sorted(self.order) != list(range(len(self.split))):
            raise ValueError(f"order {self.order} is not a permutation of the {len(self.split)} axes of {self.split}")
        if self.split.count(-1) > 1 or min((n for n in self.split if n != -1), default=1) < 1:
            raise ValueError(f"a row grid needs positive sizes and at most one -1, got {self.split}")

    def shape(self, shape: Shape) -> Shape:
        """Unchanged."""
        rows, known = _rows(shape, self), prod(n for n in self.split if n != -1)
        if rows % known or (-1 not in self.split and rows != known):
            raise ValueError(f"the rows of shape {list(shape)} do not form a grid {self.split}")
        return shape

    def view(self, x: Tensor) -> Tensor:
        """[R, ...] to [*grid in the new order, ...]."""
        grid = x.unflatten(0, self.split)
        return grid.permute(*self.order, *range(len(self.order), grid.dim()))


@dataclass(frozen=True)
class Reshape:
    """A new shape for the same elements; 0 keeps the size at that place, one -1 is inferred."""

    to: Shape

    def shape(self, shape: Shape) -> Shape:
        """The shape `to`, with its 0 and -1 filled in."""
        misfit = ValueError(f"a tensor of shape {list(shape)} cannot take the shape {list(self.to)}")
        if self.to.count(-1) > 1 or any(n == 0 and place >= len(shape) for place, n in enumerate(self.to)):
            raise misfit
        sizes = [n or shape[place] for place, n in enumerate(self.to)]
        if -1 in sizes:
            known = prod(n for n in sizes if n != -1)
            if not known:
                raise misfit
            sizes[sizes.index(-1)] = prod(shape) // known
        if prod(sizes) != prod(shape):
            raise misfit
        return tuple(sizes)

    def view(self, x: Tensor) -> Tensor:
        """`x`: the order of the elements does not change."""
        return x


def apply_shape(operations: tuple[Operation, ...], shape: Shape) -> Shape:
    """The shape after all operations."""
    for operation in operations:
        shape = operation.shape(shape)
    return shape


def apply_view(operations: tuple[Operation, ...], x: Tensor) -> Tensor:
    """A tensor whose elements, read in order, are the result's: a view, unless an operation follows a permutation."""
    shape = tuple(x.shape)
    for operation in operations:
        x = operation.view(x.reshape(shape))
        shape = operation.shape(shape)
    return x


def _rows(shape: Shape, operation: Operation) -> int:
    if not shape:
        raise ValueError(f"a scalar has no rows for {operation}")
    return shape[0]
