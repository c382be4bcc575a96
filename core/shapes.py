"""What the headers of a checkpoint say before anything is loaded: which tensors there are, of which shapes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from .checkpoint import Files, read_checkpoint, resolve_files
from .config_sizes import SOME_PARTS
from .key_matching import foreign_format
from .row_operations import Shape


@dataclass(frozen=True)
class Shapes:
    """Shapes of a checkpoint's tensors by name. Names differ from layout to layout, so each question may be asked with
    several."""

    shapes: Mapping[str, Shape]

    @classmethod
    def read(cls, files: Files, prefixes: tuple[str, ...] = ()) -> Self:
        """From headers; where names begin with one of `prefixes`, these alone, without it.

        Raises:
            FileNotFoundError, ValueError: as `read_checkpoint`; or a format that no model here comes in.
        """
        shapes = {name: tensor.shape for name, tensor in read_checkpoint(files).items()}
        foreign = foreign_format(shapes)
        if foreign is not None:
            raise ValueError(f"{resolve_files(files)[0]}: the keys are those of {foreign}")
        return cls(shapes).within(*prefixes)

    def within(self, *prefixes: str) -> Self:
        """What has the first of these prefixes that names have, without it; else all."""
        for prefix in prefixes:
            found = {name.removeprefix(prefix): x for name, x in self.shapes.items() if name.startswith(prefix)}
            if found:
                return type(self)(found)
        return self

    def of(self, *names: str, axes: int = 2) -> Shape:
        """The shape of the first of these tensors that there is.

        Raises:
            ValueError: none of them, or it has another number of axes.
        """
        name = next((name for name in names if name in self.shapes), None)
        if name is None:
            raise ValueError(f"the checkpoint holds no {' or '.join(names)}")
        if len(self.shapes[name]) != axes:
            raise ValueError(f"{name} has the shape {list(self.shapes[name])}; it must have {axes} axes")
        return self.shapes[name]

    def has(self, *names: str) -> bool:
        """Whether one of these tensors is there."""
        return any(name in self.shapes for name in names)

    def count(self, *stems: str) -> int:
        """How many numbers follow the first of these beginnings that names have: blocks are counted from 0.

        Raises:
            ValueError: a number that is far higher than that of all names.
        """
        for stem in stems:
            numbers = {name.removeprefix(stem).partition(".")[0] for name in self.shapes if name.startswith(stem)}
            found = [int(number) for number in numbers if number.isdecimal()]
            if found and max(found) >= max(SOME_PARTS, len(self.shapes)):
                raise ValueError(
                    f"{stem}{max(found)} is there, but the checkpoint holds {len(self.shapes)} tensors only"
                )
            if found:
                return 1 + max(found)
        return 0
