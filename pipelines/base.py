"""What the stages of a picture pipeline pass to each other.

Legend: N pictures, P prompts, C latent channels, H W pixels, h w latent cells.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Protocol

import torch
from torch import Tensor

from ..denoisers.base import Prompt
from ..schedulers.base import State, Step
from .manifest import Manifest
from .plan import Plan
from .request import Request
from .result import Result


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a pipeline came from: its family, the name that loads it again, and the sha256 of each weights file."""

    family: str
    name: str
    weights: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoded:
    """A request made ready: nothing here changes, so it can be denoised any number of times.

    `shape` is that of the latents, [N, C, 1, h, w]. `conditioning` has one row per prompt. `noise` holds each picture's
    generator state before its initial noise is drawn. `source` [N, C, 1, h, w] are the latents of the input pictures
    `pixels` [N, 3, 1, H, W]; `mask` [N, 1, 1, H, W] is true where to repaint. `seconds` by stage.
    """

    plan: Plan
    shape: tuple[int, ...]
    conditioning: Prompt
    noise: tuple[Tensor, ...]
    initial: Tensor | None
    source: Tensor | None
    pixels: Tensor | None
    mask: Tensor | None
    warnings: tuple[str, ...]
    seconds: Mapping[str, float]
    manifest: Manifest

    @property
    def device(self) -> torch.device:
        """Where the run computes."""
        return self.conditioning.positive.states.device

    @property
    def prompt(self) -> Prompt:
        """The conditioning, one row per picture."""
        return self.conditioning.rows(self.plan.rows)


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageStep(Step):
    """A step that knows its run, so that it can be decoded. `seconds` by stage so far."""

    encoded: Encoded
    seconds: Mapping[str, float]


class Cancelled(Exception):  # noqa: N818
    """A run was cancelled; `step` is the last one it finished, None where there is none. Its `state` can be resumed."""

    def __init__(self, step: ImageStep | None) -> None:
        done = "before its first step" if step is None else f"after step {step.index + 1} of {step.total}"
        super().__init__(f"cancelled {done}")
        self.step = step


class Pipeline(Protocol):
    """From a prompt to pictures. `__call__` and `stream` take the arguments of `Request`."""

    def encode(self, request: Request) -> Encoded:
        """Everything before the first step."""
        ...

    def denoise(
        self, encoded: Encoded, *, resume: State | None = None, cancel: Event | None = None
    ) -> Iterator[ImageStep]:
        """One step after another."""
        ...

    def decode(self, latents: ImageStep | Tensor) -> Result:
        """The pictures."""
        ...

    def save(self, folder: str | Path) -> None:
        """Everything that `load` needs."""
        ...

    def to(self, device: str | torch.device | None = None, dtype: str | torch.dtype | None = None) -> "Pipeline":
        """The same pipeline elsewhere."""
        ...


OnStep = Callable[[ImageStep], object]


def last(steps: Iterator[ImageStep] | Sequence[ImageStep]) -> ImageStep:
    """The last of the steps, all of which are taken.

    Raises:
        ValueError: there are none.
    """
    step: ImageStep | None = None
    for found in steps:
        step = found
    if step is None:
        raise ValueError("there are no steps")
    return step
