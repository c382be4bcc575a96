"""What the stages of a picture pipeline pass to each other.

Legend: N pictures, P prompts, C latent channels, F latent frames, H W pixels, h w latent cells, Lp picture states, Dv
their width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..denoisers.base import Prompt
from ..schedulers.base import Step
from .edit import with_picture_states, with_references
from .held import Held
from .manifest import Manifest
from .plan import Plan


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a pipeline came from: its family, the name that loads it again, and a sha256 of each weights file (see
    `Manifest`)."""

    family: str
    name: str
    weights: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoded:
    """A request made ready: nothing here changes, so it can be denoised any number of times.

    `shape` is that of the latents, [N, C, F, h, w]. `conditioning` has one row per prompt. `noise` holds each picture's
    generator state before its initial noise is drawn. `source` [N, C, F, h, w] are the latents of the input pictures or
    clips `pixels` [N, 3, F, H, W]; `mask` [N, 1, 1, H, W] is true where to repaint. `handed` [N, C, 1, h, w] are
    latents that another run left, where this one goes on without noise. `beside` [N, C', F, h, w] is what the model
    reads beside its latents, or latents of the first frames; `picture_states` [N, Lp, Dv] are a picture encoder's;
    `held` are frames that clips are given. `num_skipped_draws` of noise lie between the initial noise and the
    sampler's: the reference samples a masked picture there. `seconds` by stage.
    """

    plan: Plan
    shape: tuple[int, ...]
    conditioning: Prompt
    noise: tuple[Tensor, ...]
    initial: Tensor | None
    source: Tensor | None
    pixels: Tensor | None
    mask: Tensor | None
    handed: Tensor | None
    beside: Tensor | None
    num_skipped_draws: int
    warnings: tuple[str, ...]
    seconds: Mapping[str, float]
    manifest: Manifest
    picture_states: Tensor | None = None
    held: Held | None = None

    @property
    def device(self) -> torch.device:
        """Where the run computes."""
        return self.conditioning.positive.states.device

    @property
    def prompt(self) -> Prompt:
        """The conditioning, one row per picture."""
        prompt = with_picture_states(self.conditioning.rows(self.plan.rows), self.picture_states)
        prompt = prompt if self.beside is None else with_references(prompt, [self.beside])
        return prompt if self.held is None else self.held.told(prompt)


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
