"""The loop over the steps of a run that is given frames of its clips.

Legend: N clips, C latent channels, E frames ahead, f latent frames of the clip, h w latent cells.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.stream import Runner
from ..schedulers import RowNoise
from ..schedulers.base import Point, Schedule, Slope, State, Step
from .held import Held
from .walk import Walk


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldWalk(Walk):
    """One run of one encoded request. Its states have latents [N, C, E + f, h, w], its steps those of the clips.

    The sampler is begun anew from a state at each step, so that it takes none that has not what is kept as it is.
    """

    @property
    def _held(self) -> Held:
        held = self.encoded.held
        assert held is not None
        return held

    def _shape_after(self, num_steps: int) -> tuple[int, ...]:
        rows, channels, frames, *sides = self.encoded.shape
        return (rows, channels, self._held.num_ahead + frames, *sides)

    def _own(self, latents: Tensor) -> Tensor:
        return self._held.own(latents)

    def _steps(
        self,
        schedule: Schedule,
        runner: Runner,
        resume: State | None,
        check: Callable[[Slope], Slope] | None = None,
    ) -> Iterator[Step]:
        encoded = self.encoded
        x, _ = self._start(schedule, RowNoise.resumed(encoded.noise, encoded.shape))
        slope = self._slope(schedule, runner)
        return self._each(schedule, slope if check is None else check(slope), self._held.begun(x), resume)

    def _each(self, schedule: Schedule, slope: Slope, begun: Tensor, state: State | None) -> Iterator[Step]:
        """The steps that are left after `state`, of a run that begins with the latents `begun`."""
        held, sampler = self._held, self.encoded.plan.sampler
        noise = RowNoise.resumed(held.noise if state is None else state.noise, begun.shape)
        x = begun if state is None else state.latents.to(begun.device, torch.float32)
        for _, point, _ in schedule.steps(0 if state is None else state.index):
            x, keeps = held.noised(x, begun, noise, point.sigma), held.keeps(point.sigma, x)
            state = None if state is None else dataclasses.replace(state, latents=x, noise=noise.state())
            step = next(sampler(_kept(slope, held, x, keeps), x, schedule, noise, state))
            latents, after = (torch.where(keeps, x, each) for each in (step.latents, step.state.latents))
            x, state = after, dataclasses.replace(step.state, latents=after)
            yield dataclasses.replace(step, latents=held.own(latents), denoised=held.own(step.denoised), state=state)


def _kept(slope: Slope, held: Held, begun: Tensor, keeps: Tensor) -> Slope:
    """`slope` of latents of which the frames that a step keeps are as it begins, in `begun`. By it x0 is what the slope
    says at a frame's own noise level, which may be lower than that of a point."""

    def kept(x: Tensor, point: Point) -> Tensor:
        return slope(torch.where(keeps, begun, x), point) * held.shares(point.sigma, x)

    return kept
