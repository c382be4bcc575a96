"""What schedules, samplers and their callers pass to each other.

On both paths `x = alpha x0 + sigma noise`: flow has alpha = 1 - sigma, exploding has alpha = 1. A slope is dx/dsigma
(flow: noise - x0, exploding: noise), so `x0 = x - sigma slope` on both. Latents are float32 [B, C, F, H, W].
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

Path = Literal["flow", "exploding"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One place on a schedule.

    `index` in the full schedule, noise level `sigma`, data level `alpha`, and `time`, what the model is told.
    """

    index: int
    sigma: float
    alpha: float
    time: float

    def noised(self, x0: Tensor, noise: Tensor) -> Tensor:
        """`alpha x0 + sigma noise`: where a run that starts here begins."""
        return self.alpha * x0 + self.sigma * noise


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """An immutable table of points, sigma strictly falling; the last sigma is 0 unless the schedule ends early.

    Step i goes from point i to point i + 1.

    Raises:
        ValueError: fewer than two points, indices that do not count up by one, a sigma that does not fall, is not
            finite or lies outside the path's range, or an alpha that is not the path's.
    """

    points: tuple[Point, ...]
    path: Path

    def __post_init__(self) -> None:
        """Check the table."""
        if len(self.points) < 2:
            raise ValueError(f"a schedule needs at least two points (one step), got {len(self.points)}")
        check_sigmas(self.sigmas, self.path)
        first = self.points[0].index
        for i, point in enumerate(self.points):
            if point.index != first + i:
                raise ValueError(f"point {i} of the schedule has index {point.index}; it must be {first + i}")
            alpha = 1.0 - point.sigma if self.path == "flow" else 1.0
            if not math.isclose(point.alpha, alpha, abs_tol=1e-6):
                raise ValueError(
                    f"alpha at sigma {point.sigma:g} must be {alpha:g} on the {self.path} path, got {point.alpha:g}"
                )

    @property
    def num_steps(self) -> int:
        """How many steps a sampler takes."""
        return len(self.points) - 1

    @property
    def sigmas(self) -> tuple[float, ...]:
        """The noise level of every point."""
        return tuple(point.sigma for point in self.points)

    def steps(self, first: int = 0) -> Iterator[tuple[int, Point, Point]]:
        """`(i, point i, point i + 1)` for each step from `first` on."""
        for i in range(first, self.num_steps):
            yield i, self.points[i], self.points[i + 1]

    def between(self, start: int, stop: int) -> Self:
        """Only steps `start` to `stop - 1` (a late start, an early end); points keep their index.

        Raises:
            ValueError: not 0 <= start < stop <= num_steps.
        """
        if not 0 <= start < stop <= self.num_steps:
            raise ValueError(f"steps {start}..{stop} are not a part of 0..{self.num_steps}")
        return replace(self, points=self.points[start : stop + 1])

    def starting_at(self, strength: float) -> Self:
        """The last `int(num_steps * strength)` steps, at least one (image-to-image); points keep their index.

        Start from `points[0].noised(x0, noise)`. Strength 0 also keeps one step: to return the input
        is the caller's case.

        Raises:
            ValueError: strength outside [0, 1].
        """
        if not 0.0 <= strength <= 1.0:
            raise ValueError(f"strength must lie in [0, 1], got {strength:g}")
        kept = max(1, min(int(self.num_steps * strength), self.num_steps))
        return self.between(self.num_steps - kept, self.num_steps)


class Slope(Protocol):
    """A bound denoiser: dx/dsigma, float32, of x's shape."""

    def __call__(self, x: Tensor, point: Point) -> Tensor:
        """The slope at latents `x` [B, C, F, H, W] and `point`."""
        ...


class Noise(Protocol):
    """Standard normal noise for the sampler, row b from generator b only."""

    def __call__(self, i: int) -> Tensor:
        """The draw of step `i`, float32 [B, C, F, H, W] on the CPU; steps ask in rising order, at most once each."""
        ...

    def state(self) -> tuple[Tensor, ...]:
        """One uint8 generator state per row."""
        ...

    def restore(self, states: tuple[Tensor, ...]) -> None:
        """Go on as after `state()` returned `states`."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class State:
    """Enough to go on after a step, in another process.

    `index` steps are done; `latents` after them; the sampler's `history`; one generator state per row in `noise`.
    """

    index: int
    latents: Tensor
    history: tuple[Tensor, ...]
    noise: tuple[Tensor, ...]

    def to_tensors(self) -> dict[str, Tensor]:
        """Contiguous CPU tensors by name: `index`, `latents`, `history.{i}`, `noise.{b}` (as safetensors take)."""
        tensors = {"index": torch.tensor(self.index), "latents": self.latents}
        tensors |= {f"history.{i}": tensor for i, tensor in enumerate(self.history)}
        tensors |= {f"noise.{b}": tensor for b, tensor in enumerate(self.noise)}
        return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """The state that `to_tensors` wrote.

        Raises:
            ValueError: a name is missing or unknown.
        """
        history, noise = _numbered(tensors, "history"), _numbered(tensors, "noise")
        expected = {
            "index",
            "latents",
            *(f"history.{i}" for i in range(len(history))),
            *(f"noise.{b}" for b in range(len(noise))),
        }
        if expected != set(tensors):
            missing, unknown = sorted(expected - set(tensors)), sorted(set(tensors) - expected)
            raise ValueError(f"not a sampler state: missing {missing}, unknown {unknown}")
        return cls(index=int(tensors["index"]), latents=tensors["latents"], history=history, noise=noise)


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """What a sampler yields after each step.

    `index` counts from 0 to `total` - 1; `latents` are at noise level `sigma` (0 after the last step of a full
    schedule); `denoised` is the x0 predicted where the step began; `state` resumes after it. `chunk` counts the chunks
    of causal video. Do not write into the tensors.
    """

    index: int
    total: int
    sigma: float
    latents: Tensor
    denoised: Tensor
    state: State
    chunk: int | None = None


@runtime_checkable
class Sampler(Protocol):
    """A solver: a pure function from slope, latents, schedule and noise to steps."""

    @property
    def name(self) -> str:
        """The name a user asks for."""
        ...

    def evaluations(self, schedule: Schedule) -> tuple[Point, ...]:
        """Every point that the slope will be asked at, in order, without repeats."""
        ...

    def __call__(
        self, slope: Slope, x: Tensor, schedule: Schedule, noise: Noise, state: State | None = None
    ) -> Iterator[Step]:
        """One step after another from `x` (at the schedule's first sigma), never writing into it.

        With `state`, the rest of the run that saved it: its latents replace `x` (which still says shape and device) and
        `noise` is restored from it. A ValueError where the state is not of this sampler, schedule or shape.
        """
        ...


def check_sigmas(sigmas: Sequence[float], path: Path) -> None:
    """Refuse sigmas that do not fall strictly or leave the path's range.

    Raises:
        ValueError: naming the first such value and its position.
    """
    top = 1.0 if path == "flow" else math.inf
    for i, sigma in enumerate(sigmas):
        if not math.isfinite(sigma) or not 0.0 <= sigma <= top:
            allowed = "0 <= sigma <= 1" if path == "flow" else "finite values from 0 up"
            raise ValueError(f"sigma {sigma:g} at position {i} is outside the {path} path: allowed are {allowed}")
        if i > 0 and sigma >= sigmas[i - 1]:
            raise ValueError(f"sigmas must fall strictly, but {sigma:g} at position {i} follows {sigmas[i - 1]:g}")


def _numbered(tensors: Mapping[str, Tensor], prefix: str) -> tuple[Tensor, ...]:
    count = sum(name.startswith(f"{prefix}.") for name in tensors)
    return tuple(tensors[name] for name in (f"{prefix}.{i}" for i in range(count)) if name in tensors)
