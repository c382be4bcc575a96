"""Where a run stopped being finite."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.stream import Block, BlockInputs, Cache, Stream
from ..schedulers.base import Point, Slope


class NonFiniteError(ArithmeticError):
    """A NaN or an infinity came up: `stage` ("encode", "denoise" or "decode"), `step` (from 0) and `block`, where they
    are known; `weight` is the name, and the file, of a weight that is not finite itself."""

    def __init__(
        self,
        stage: str,
        step: int | None = None,
        total: int | None = None,
        block: str | None = None,
        weight: str | None = None,
    ) -> None:
        place = stage if step is None else f"{stage}, step {step} of {total} (counted from 0)"
        place = place if block is None else f"{place}, {block}"
        cause = "" if weight is None else f"; weights are not finite themselves: {weight}"
        super().__init__(f"non-finite values in {place}{cause}")
        self.stage, self.step, self.total, self.block, self.weight = stage, step, total, block, weight


class NonFiniteBlockError(ArithmeticError):
    """What the checks below raise: `block` says where, in words."""

    def __init__(self, block: str) -> None:
        super().__init__(block)
        self.block = block


def is_finite(x: Tensor) -> bool:
    """Whether every value is; waits for the device."""
    return bool(torch.isfinite(x).all())


@dataclass(frozen=True)
class CheckedRunner:
    """A runner that checks after every block, and so names the first to go wrong."""

    def __call__(self, blocks: Sequence[Block], stream: Stream, prepared: BlockInputs, cache: Cache) -> Stream:
        """The stream after all blocks."""
        self._check(stream, "before block 0")
        for index, block in enumerate(blocks):
            stream = block(stream, prepared, cache, index)
            self._check(stream, f"block {index} of {len(blocks)}")
        return stream

    def look(self, x: Tensor, place: str) -> None:
        """Raises where a value is not finite."""
        if not is_finite(x):
            raise NonFiniteBlockError(place)

    def _check(self, stream: Stream, place: str) -> None:
        for x in (stream.x,) if stream.context is None else (stream.x, stream.context):
            self.look(x, place)


def checked(slope: Slope) -> Slope:
    """The same slope, with a check of what it is given and of what it returns."""

    def check(x: Tensor, point: Point) -> Tensor:
        if not is_finite(x):
            raise NonFiniteBlockError("the sampler's latents")
        d = slope(x, point)
        if not is_finite(d):
            raise NonFiniteBlockError("after the last block")
        return d

    return check
