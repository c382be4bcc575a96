"""What tells families of denoisers apart by the names and shapes in their checkpoints' headers."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeVar, cast

from ..core.shapes import Shapes

__all__ = ["PREFIXES", "Marks", "Shapes", "rotary_share"]

PREFIXES = ("model.diffusion_model.",)
"""What whole checkpoints, and ComfyUI, put before the names of a denoiser."""
_Axes = TypeVar("_Axes", bound=tuple[int, ...])


@dataclass(frozen=True)
class Marks:
    """Names that all checkpoints of one family hold, by layout, and no other family's all together."""

    layouts: tuple[tuple[str, ...], ...] = ()

    def share(self, names: Collection[str]) -> float:
        """The share of one layout's names that are there, 1 where all are; of the layout that comes nearest."""
        return max((sum(name in names for name in layout) / len(layout) for layout in self.layouts), default=0.0)

    def within(self, others: "Marks") -> bool:
        """Whether each of the others' layouts holds all names of one of these: what has them is of this kind too."""
        return all(any({*layout} <= {*other} for layout in self.layouts) for other in others.layouts)


def rotary_share(axes: _Axes, head_width: int) -> _Axes:
    """Rotary axes, in the same shares of another head, for checkpoints whose shapes do not tell them.

    Raises:
        ValueError: they would not be whole pairs.
    """
    total = sum(axes)
    found = tuple(axis * head_width // total for axis in axes)
    if sum(found) != head_width or any(axis % 2 for axis in found):
        raise ValueError(f"heads are {head_width} wide; which rotary axes they have is known for {total} only")
    return cast(_Axes, found)
