"""Guidance by leaving blocks out (SD3.5 medium).

Legend: B rows, C latent channels, F frames, h w latent cells; c, u the conditional and unconditional slope, s the
conditional one without some blocks.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from ..core.stream import Block, BlockInputs, Cache, Runner, Stream
from ..schedulers.base import Point, Slope
from .base import Conditioning, Denoiser, P, Prompt
from .guidance import ClassifierFree, Run, slopes_of_both

Slopes: TypeAlias = Callable[[Tensor, Point], tuple[Tensor, ...]]


@dataclass(frozen=True)
class SkipLayers:
    """What `then` gives, plus scale (c - s), where s is computed without the blocks `layers`.

    Only at steps i of n with n start < i < n stop, as in diffusers' StableDiffusion3Pipeline; what Stability AI
    recommends for SD3.5 medium is the defaults, with `then` at a scale of 4 to 5. No layers, scale 0 or no such steps
    is bit-identical to `then`.
    """

    layers: tuple[int, ...] = (7, 8, 9)
    scale: float = 2.8
    start: float = 0.01
    stop: float = 0.2
    then: ClassifierFree = ClassifierFree(4.5)  # noqa: RUF009 (immutable)

    def __post_init__(self) -> None:
        if any(type(layer) is not int or layer < 0 for layer in self.layers):
            raise ValueError(f"layers to skip are {self.layers}; they must be numbers of blocks, from 0")
        if not math.isfinite(self.scale):
            raise ValueError(f"scale of skipped layers is {self.scale}; it must be a finite number")
        if not (0.0 <= self.start <= 1.0 and 0.0 <= self.stop <= 1.0):
            raise ValueError(f"layers are skipped from {self.start} to {self.stop}; each must be from 0 to 1")

    @property
    def needs_negative(self) -> bool:
        """As `then` does."""
        return self.then.needs_negative

    def bind(self, denoiser: Denoiser[P], prompt: Prompt, run: Run) -> Slope:
        """The guided slope. Errors as for `then`, and ValueError for layers that the model does not have."""
        inside = [point for point in run.evaluations if self._skips_at(point, run.evaluations)]
        if not inside:
            return self.then.bind(denoiser, prompt, run)
        places = {point.index for point in inside}
        outside = dataclasses.replace(run, evaluations=[p for p in run.evaluations if p.index not in places])
        plain = self.then.bind(denoiser, prompt, outside) if outside.evaluations else None
        skipping = self._skipping(denoiser, prompt, dataclasses.replace(run, evaluations=inside))

        def slope(x: Tensor, point: Point) -> Tensor:
            return skipping(x, point) if plain is None or point.index in places else plain(x, point)

        return slope

    def _skips_at(self, point: Point, evaluations: Sequence[Point]) -> bool:
        n = max(each.index for each in evaluations) + 1
        return bool(self.layers) and self.scale != 0 and n * self.start < point.index < n * self.stop

    def _skipping(self, denoiser: Denoiser[P], prompt: Prompt, run: Run) -> Slope:
        """The slope where layers are skipped: both passes of `then`, as one batch where that can be, and one more."""
        whole = self._whole(denoiser, prompt, run)
        runner = Skipping(layers=frozenset(self.layers), runner=run.runner)
        partial = _forward(denoiser, prompt.positive, dataclasses.replace(run, runner=runner))

        def slope(x: Tensor, point: Point) -> Tensor:
            slopes = whole(x, point)
            guided = self.then.combine(*slopes) if len(slopes) == 2 and self.then.guides(point) else slopes[0]
            return guided + self.scale * (slopes[0] - partial(x, point))

        return slope

    def _whole(self, denoiser: Denoiser[P], prompt: Prompt, run: Run) -> Slopes:
        """c and, where `then` needs it, u."""
        if prompt.negative is not None and self.then.needs_negative:
            return slopes_of_both(denoiser, prompt.positive, prompt.negative, run, batched=True)
        alone = _forward(denoiser, prompt.positive, run)
        return lambda x, point: (alone(x, point),)


@dataclass(frozen=True, kw_only=True)
class Skipping:
    """A runner that leaves out the blocks `layers`, which keep their numbers."""

    layers: frozenset[int]
    runner: Runner

    def __call__(self, blocks: Sequence[Block], stream: Stream, prepared: BlockInputs, cache: Cache) -> Stream:
        """The stream after all other blocks.

        Raises:
            ValueError: there are not so many blocks.
        """
        if max(self.layers) >= len(blocks):
            raise ValueError(f"layers to skip are {sorted(self.layers)}; the model has blocks 0 to {len(blocks) - 1}")
        kept = [_pass if i in self.layers else block for i, block in enumerate(blocks)]
        return self.runner(kept, stream, prepared, cache)


def _pass(stream: Stream, prepared: BlockInputs, cache: Cache, i: int) -> Stream:
    """No block."""
    return stream


def _forward(denoiser: Denoiser[P], conditioning: Conditioning, run: Run) -> Slope:
    prepared = denoiser.prepare(conditioning, run.shape, run.evaluations, attention=run.attention, runner=run.runner)
    return lambda x, point: denoiser.slope(x, prepared, point)
