"""Guidance: how the slopes of a prompt, and of what to stay away from, become the one slope a sampler follows.

Each guidance owns its forwards: `bind` prepares the denoiser once, and returns the slope for a whole run.

Legend: B rows, C latent channels, F frames, h w latent cells; c, u the conditional and unconditional slope.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from ..core.attention.base import AttentionSelector
from ..core.stream import Runner, run_blocks
from ..schedulers.base import Point, Slope
from .base import Conditioning, Denoiser, P, PairingDenoiser, Prompt, SharingDenoiser, UnmaskedDenoiser
from .patches import patchify, unpatchify


@dataclass(frozen=True, kw_only=True)
class Run:
    """What every guidance needs besides the denoiser and the prompt: the latents' shape [B, C, F, h, w], all points,
    how to compute."""

    shape: tuple[int, ...]
    evaluations: Sequence[Point]
    attention: AttentionSelector
    runner: Runner = run_blocks


@runtime_checkable
class Guidance(Protocol):
    """Chooses which forwards a run makes, and combines them."""

    @property
    def needs_negative(self) -> bool:
        """Whether `bind` wants `prompt.negative`."""
        ...

    def bind(self, denoiser: Denoiser[P], prompt: Prompt, run: Run) -> Slope:
        """The slope that the sampler follows, for rows as in `prompt`."""
        ...


@dataclass(frozen=True)
class Unguided:
    """One conditional pass."""

    @property
    def needs_negative(self) -> bool:
        """Never."""
        return False

    def bind(self, denoiser: Denoiser[P], prompt: Prompt, run: Run) -> Slope:
        """c."""
        return _forward(denoiser, prompt.positive, run, run.evaluations)


class Renormalisation(Protocol):
    """What a family does to a guided slope, given c: keeps its size in bounds."""

    def __call__(self, guided: Tensor, c: Tensor) -> Tensor:
        """The slope to follow, [B, C, F, h, w] as both are."""
        ...


@dataclass(frozen=True)
class TokenNorm:
    """guided ||c|| / ||guided||, token by token, of `patch` x `patch` cells with all their channels (Qwen-Image); a
    token of zeros stays zero."""

    patch: int

    def __call__(self, guided: Tensor, c: Tensor) -> Tensor:
        """Each token as long as c's."""
        tokens, like = patchify(guided, self.patch), patchify(c, self.patch)
        wanted, found = (h.norm(dim=-1, keepdim=True) for h in (like, tokens))
        factor = torch.where(found > 0, wanted / found, torch.ones_like(found))
        return unpatchify(tokens * factor, guided.shape, self.patch)


@dataclass(frozen=True)
class NormLimit:
    """guided, made shorter where a row is over `factor` times as long as c (Z-Image)."""

    factor: float

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise ValueError(f"a norm limit's factor is {self.factor}; it must be a finite number over 0")

    def __call__(self, guided: Tensor, c: Tensor) -> Tensor:
        """Each row at most that long."""
        axes = tuple(range(1, guided.ndim))
        found, like = (torch.linalg.vector_norm(x, dim=axes, keepdim=True) for x in (guided, c))
        longest = self.factor * like
        return torch.where(found > longest, guided * (longest / found), guided)


@dataclass(frozen=True)
class ClassifierFree:
    """u + scale (c - u) (Ho and Salimans 2022).

    `batched`: both passes as one batch of 2B rows, where the model takes both texts together, else one after the other;
    the same within rounding. `interval`: guide only where the noise's share sigma / (alpha + sigma) lies in it, both
    ends included, and take c elsewhere (Kynkaanniemi et al. 2024); an interval whose start is not below its end is
    empty. `rescale`: mix in, by this share, the result rescaled per row to the standard deviation of c (Lin et al.
    2023, section 3.4). `renormalise`: what the family does to the result then.

    Scale 1 runs the conditional pass alone, scale 0 without rescale and renormalisation the unconditional one alone,
    bit-identical to `Unguided`.
    """

    scale: float
    batched: bool = True
    interval: tuple[float, float] = (0.0, 1.0)
    rescale: float = 0.0
    renormalise: Renormalisation | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise ValueError(f"guidance scale is {self.scale}; it must be a finite number")
        if not 0.0 <= self.rescale <= 1.0:
            raise ValueError(f"guidance rescale is {self.rescale}; it must be from 0 to 1")
        if len(self.interval) != 2 or not all(_is_share(end) for end in self.interval):
            raise ValueError(f"guidance interval is {self.interval}; it takes a start and an end, each from 0 to 1")

    @property
    def needs_negative(self) -> bool:
        """Unless every pass is the conditional one."""
        return self.scale != 1.0 and self.interval[0] < self.interval[1]

    def bind(self, denoiser: Denoiser[P], prompt: Prompt, run: Run) -> Slope:
        """The guided slope.

        Raises:
            ValueError: the unconditional pass is needed and the prompt has no negative.
        """
        guided = [point for point in run.evaluations if self.guides(point)]
        if not guided:
            return _forward(denoiser, prompt.positive, run, run.evaluations)
        if prompt.negative is None:
            raise ValueError(f"guidance at scale {self.scale} needs a negative prompt's conditioning as well")
        inside = self._inside(denoiser, prompt.positive, prompt.negative, run, guided)
        plain = [point for point in run.evaluations if not self.guides(point)]
        if not plain:
            return inside
        outside = _forward(denoiser, prompt.positive, run, plain)

        def slope(x: Tensor, point: Point) -> Tensor:
            return inside(x, point) if self.guides(point) else outside(x, point)

        return slope

    def guides(self, point: Point) -> bool:
        """Whether anything but the conditional pass happens at `point`."""
        start, end = self.interval
        return self.needs_negative and start <= point.sigma / (point.alpha + point.sigma) <= end

    def combine(self, c: Tensor, u: Tensor) -> Tensor:
        """The guided slope of c and u, each [B, C, F, h, w]."""
        guided = u + self.scale * (c - u)
        guided = rescaled(guided, c, self.rescale) if self.rescale else guided
        return guided if self.renormalise is None else self.renormalise(guided, c)

    def _inside(
        self, denoiser: Denoiser[P], positive: Conditioning, negative: Conditioning, run: Run, points: Sequence[Point]
    ) -> Slope:
        if self.scale == 0.0 and self.rescale == 0.0 and self.renormalise is None:
            return _forward(denoiser, negative, run, points)
        told = dataclasses.replace(run, evaluations=points)
        both = slopes_of_both(denoiser, positive, negative, told, batched=self.batched)
        return lambda x, point: self.combine(*both(x, point))


@dataclass(frozen=True)
class Distilled:
    """A guidance-distilled model: it is told `scale` (None: models without such an input), then guided by `then`."""

    scale: float | None
    then: Guidance = Unguided()

    def __post_init__(self) -> None:
        if self.scale is not None and not math.isfinite(self.scale):
            raise ValueError(f"guidance scale is {self.scale}; it must be a finite number")

    @property
    def needs_negative(self) -> bool:
        """As `then` does."""
        return self.then.needs_negative

    def bind(self, denoiser: Denoiser[P], prompt: Prompt, run: Run) -> Slope:
        """The slope of `then`, with both sides told the value."""
        negative = None if prompt.negative is None else self._told(prompt.negative)
        return self.then.bind(denoiser, Prompt(positive=self._told(prompt.positive), negative=negative), run)

    def _told(self, conditioning: Conditioning) -> Conditioning:
        return dataclasses.replace(conditioning, guidance=self.scale)


def rescaled(guided: Tensor, c: Tensor, share: float) -> Tensor:
    """(1 - share) guided + share guided std(c) / std(guided), per row; a row without deviation stays as it is."""
    axes = tuple(range(1, guided.ndim))
    wanted, found = c.std(axes, keepdim=True), guided.std(axes, keepdim=True)
    factor = torch.where(found > 0, wanted / found, torch.ones_like(found))
    return guided * (1.0 - share + share * factor)


def slopes_of_both(
    denoiser: Denoiser[P], positive: Conditioning, negative: Conditioning, run: Run, *, batched: bool
) -> Callable[[Tensor, Point], tuple[Tensor, Tensor]]:
    """c and u at the points of a run: `batched` from one batch of 2B rows, where the denoiser takes both texts
    together, else one after the other."""
    if not batched or not _are_taken_together(denoiser, positive, negative):
        first, second = prepare_both(denoiser, positive, negative, run)
        return lambda x, point: (denoiser.slope(x, first, point), denoiser.slope(x, second, point))
    doubled = dataclasses.replace(run, shape=(2 * run.shape[0], *run.shape[1:]))
    forward = _forward(denoiser, Conditioning.concatenate((positive, negative)), doubled, run.evaluations)

    def slopes(x: Tensor, point: Point) -> tuple[Tensor, Tensor]:
        c, u = forward(torch.cat((x, x)), point).chunk(2)
        return c, u

    return slopes


def prepare_both(denoiser: Denoiser[P], first: Conditioning, second: Conditioning, run: Run) -> tuple[P, P]:
    """What `prepare` gives for each of two conditionings; what they can share is made, or read, once."""
    if isinstance(denoiser, PairingDenoiser):
        pairing = cast(PairingDenoiser[P], denoiser)
        return pairing.prepare_both(
            first, second, run.shape, run.evaluations, attention=run.attention, runner=run.runner
        )
    each = denoiser.prepare(first, run.shape, run.evaluations, attention=run.attention, runner=run.runner)
    if isinstance(denoiser, SharingDenoiser):
        return each, cast(SharingDenoiser[P], denoiser).prepare_beside(each, second, run.shape)
    other = denoiser.prepare(second, run.shape, run.evaluations, attention=run.attention, runner=run.runner)
    return each, other


def _forward(denoiser: Denoiser[P], conditioning: Conditioning, run: Run, points: Sequence[Point]) -> Slope:
    prepared = denoiser.prepare(conditioning, run.shape, points, attention=run.attention, runner=run.runner)
    return lambda x, point: denoiser.slope(x, prepared, point)


def _are_taken_together(denoiser: object, first: Conditioning, second: Conditioning) -> bool:
    return not isinstance(denoiser, UnmaskedDenoiser) or denoiser.takes_together(first, second)


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1
