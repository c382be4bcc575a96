"""The loop over the chunks of a clip, and over the steps of each.

A run's steps count through all chunks that are made. Latents and states hold the clip so far: what was given of it,
finished chunks, and the one that is being made. To go on from a state, finished chunks go through the network again, so
that it remembers them as before.

Legend: N clips, C latent channels, F latent frames, f of them so far, h w latent cells.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ..core.stream import Runner
from ..denoisers.causal import CausalDenoiser
from ..schedulers import RowNoise
from ..schedulers.base import Point, Schedule, Slope, State, Step
from .walk import Walk


@dataclass(frozen=True, kw_only=True, eq=False)
class CausalWalk(Walk):
    """One run of one encoded request, whose clips are made chunk by chunk."""

    @property
    def _denoiser(self) -> CausalDenoiser[Any]:
        return cast(CausalDenoiser[Any], self.denoiser)

    @property
    def _given(self) -> Tensor:
        """Latents that the clips begin with, [N, C, f, h, w]; f is 0 where there are none."""
        encoded = self.encoded
        given = encoded.source if encoded.beside is None else encoded.beside
        rows, channels, _, *sides = encoded.shape
        return torch.zeros(rows, channels, 0, *sides, device=encoded.device) if given is None else given

    @property
    def _begun(self) -> tuple[int, ...]:
        """Latent frames of each chunk that is given."""
        return self._denoiser.chunks.begun(self._given.shape[2])

    @property
    def _lengths(self) -> tuple[int, ...]:
        """Latent frames of each chunk that is made."""
        return self._denoiser.chunks.lengths(self.encoded.shape[2], self._given.shape[2])[len(self._begun) :]

    def _total(self, schedule: Schedule) -> int:
        return schedule.num_steps * len(self._lengths)

    def _shape_after(self, num_steps: int) -> tuple[int, ...]:
        schedule = self.encoded.plan.schedule
        assert schedule is not None
        begun = -(-num_steps // schedule.num_steps)
        rows, channels, _, *sides = self.encoded.shape
        return (rows, channels, self._given.shape[2] + sum(self._lengths[:begun]), *sides)

    def _steps(
        self,
        schedule: Schedule,
        runner: Runner,
        resume: State | None,
        check: Callable[[Slope], Slope] | None = None,
    ) -> Iterator[Step]:
        encoded = self.encoded
        prepared = self._denoiser.prepare(
            encoded.conditioning.rows(encoded.plan.rows).positive,
            encoded.shape,
            encoded.plan.sampler.evaluations(schedule),
            attention=self.attention,
            runner=runner,
        )

        def slope(x: Tensor, point: Point) -> Tensor:
            return self._denoiser.slope(x, prepared, point)

        begun = State(index=0, latents=self._given, history=(), noise=encoded.noise) if resume is None else resume
        return self._chunks(schedule, prepared, slope if check is None else check(slope), begun)

    def _chunks(self, schedule: Schedule, prepared: Any, slope: Slope, begun: State) -> Iterator[Step]:
        """The steps that are left after `begun`. What comes after a chunk's last step is done when its next one is
        asked for."""
        lengths, (first, num_done) = self._lengths, divmod(begun.index, schedule.num_steps)
        start = self._given.shape[2] + sum(lengths[:first])
        clip, rest = begun.latents.to(self.encoded.device, torch.float32).split_with_sizes(
            [start, begun.latents.shape[2] - start], dim=2
        )
        for part in clip.split_with_sizes([*self._begun, *lengths[:first]], dim=2):
            self._denoiser.remember(part, prepared)
        state = dataclasses.replace(begun, index=num_done, latents=rest) if num_done else None
        noise = begun.noise
        for number in range(first, len(lengths)):
            place = slice(clip.shape[2], clip.shape[2] + lengths[number])
            step = None
            for step in self._chunk(schedule, slope, place, noise, state):
                yield _of_clip(step, clip, schedule.num_steps * number, number, len(lengths))
            assert step is not None
            clip, noise, state = torch.cat((clip, step.latents), dim=2), step.state.noise, None
            if number + 1 < len(lengths):
                self._denoiser.remember(step.latents, prepared)

    def _chunk(
        self, schedule: Schedule, slope: Slope, place: slice, noise: tuple[Tensor, ...], state: State | None
    ) -> Iterator[Step]:
        """The sampler's steps for the latent frames at `place`; `noise` is as the chunk before left it."""
        encoded = self.encoded
        rows, channels, _, *sides = encoded.shape
        drawing = RowNoise.resumed(noise, (rows, channels, place.stop - place.start, *sides))
        if state is not None:
            x = state.latents
        elif encoded.initial is not None:
            x = self.ends.noise_scale(schedule) * encoded.initial[:, :, place]
        else:
            x = self.ends.noise_scale(schedule) * drawing.draw().to(encoded.device)
        return encoded.plan.sampler(slope, x, schedule, drawing, state)


def _of_clip(step: Step, before: Tensor, num_before: int, chunk: int, num_chunks: int) -> Step:
    """A chunk's step as one of the clip's, after `num_before` steps and the frames `before`."""
    latents, denoised = (torch.cat((before, each), dim=2) for each in (step.latents, step.denoised))
    history = step.state.history if step.index + 1 < step.total else ()
    state = dataclasses.replace(step.state, index=num_before + step.state.index, latents=latents, history=history)
    return dataclasses.replace(
        step,
        index=num_before + step.index,
        total=step.total * num_chunks,
        latents=latents,
        denoised=denoised,
        state=state,
        chunk=chunk,
    )
