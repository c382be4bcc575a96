"""The loop over the steps of one run.

Legend: N pictures, C latent channels, h w latent cells.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from threading import Event
from typing import Any, cast

import torch
from torch import Tensor

from ..core.attention.base import AttentionSelector
from ..core.stream import Runner, run_blocks
from ..denoisers.base import Denoiser
from ..denoisers.guidance import Run
from ..schedulers import RowNoise
from ..schedulers.base import Schedule, Slope, State, Step
from .base import Cancelled, Encoded, ImageStep
from .finite import NonFiniteBlockError, NonFiniteError, checked, is_finite, run_checked
from .inpaint import keep_outside, latent_mask


@dataclass(frozen=True, kw_only=True, eq=False)
class Walk:
    """One run of one encoded request."""

    denoiser: Denoiser[Any]
    attention: AttentionSelector
    downsampling: int
    encoded: Encoded

    def steps(self, resume: State | None, cancel: Event | None) -> Iterator[ImageStep]:
        """See `ImagePipeline.denoise`."""
        schedule = self.encoded.plan.schedule
        total = 0 if schedule is None else schedule.num_steps
        if resume is not None:
            self._check_resume(resume, total)
        if schedule is None:
            return self._nothing_to_do(resume or self._unstarted(), total, cancel)
        if resume is not None and resume.index == total:
            return self._nothing_to_do(resume, total, cancel)
        return self._run(schedule, resume, cancel)

    def _run(self, schedule: Schedule, resume: State | None, cancel: Event | None) -> Iterator[ImageStep]:
        """Gradients are off while a step is computed, and as the caller has them while it is looked at."""
        seconds = dict(self.encoded.seconds)
        _check_cancel(cancel, None)
        start = time.perf_counter()
        with torch.no_grad():
            x, noise = self._start(schedule)
            slope = self._slope(schedule, run_blocks)
            steps = self.encoded.plan.sampler(slope, x, schedule, noise, resume)
        seconds |= {"prepare": time.perf_counter() - start, "denoise": 0.0}
        previous, done = resume, None
        while True:
            _check_cancel(cancel, done)
            start = time.perf_counter()
            with torch.no_grad():
                step = next(steps, None)
            if step is None:
                return
            if not (is_finite(step.latents) and is_finite(step.denoised)):
                self._find_cause(schedule, previous, step)
            taken = time.perf_counter() - start
            seconds = seconds | {"denoise": seconds["denoise"] + taken, f"step {step.index}": taken}
            previous, done = step.state, self._of_this_run(step, seconds)
            yield done

    def _start(self, schedule: Schedule) -> tuple[Tensor, RowNoise]:
        """Latents at the first point, and the noise that is left for the sampler; the same whenever it is called."""
        noise = RowNoise.resumed(self.encoded.noise, self.encoded.shape)
        drawn = noise.draw().to(self.encoded.device) if self.encoded.initial is None else self.encoded.initial
        point = schedule.points[0]
        source = self.encoded.source
        return (point.sigma * drawn if source is None else point.noised(source, drawn)), noise

    def _slope(self, schedule: Schedule, runner: Runner) -> Slope:
        plan = self.encoded.plan
        points = plan.sampler.evaluations(schedule)
        run = Run(shape=self.encoded.shape, evaluations=points, attention=self.attention, runner=runner)
        slope = plan.guidance.bind(self.denoiser, self.encoded.prompt, run)
        if self.encoded.mask is None or self.encoded.source is None:
            return slope
        repaint = latent_mask(self.encoded.mask.to(self.encoded.device), self.downsampling)
        return keep_outside(slope, self.encoded.source, repaint)

    def _find_cause(self, schedule: Schedule, previous: State | None, step: Step) -> None:
        """Takes the step again from where it began, with a check per block, and raises."""
        block = "and not when the step was run again"
        try:
            with torch.no_grad():
                x, noise = self._start(schedule)
                slope = checked(self._slope(schedule, run_checked))
                again = next(self.encoded.plan.sampler(slope, x, schedule, noise, previous))
            if not (is_finite(again.latents) and is_finite(again.denoised)):
                block = f"in the sampler {self.encoded.plan.sampler.name}"
        except NonFiniteBlockError as error:
            block = error.block
        raise NonFiniteError("denoise", step.index, step.total, block)

    def _nothing_to_do(self, state: State, total: int, cancel: Event | None) -> Iterator[ImageStep]:
        _check_cancel(cancel, None)
        schedule = self.encoded.plan.schedule
        sigma = 0.0 if schedule is None else schedule.points[-1].sigma
        step = Step(
            index=max(total - 1, 0),
            total=total,
            sigma=sigma,
            latents=state.latents,
            denoised=state.latents,
            state=state,
        )
        done = self._of_this_run(step, self.encoded.seconds)
        yield done
        _check_cancel(cancel, done)

    def _unstarted(self) -> State:
        """The state of a run that takes no steps (strength 0): the input's own latents."""
        source = self.encoded.source
        assert source is not None
        return State(index=0, latents=source, history=(), noise=self.encoded.noise)

    def _of_this_run(self, step: Step, seconds: Mapping[str, float]) -> ImageStep:
        return ImageStep(
            index=step.index,
            total=step.total,
            sigma=step.sigma,
            latents=step.latents,
            denoised=step.denoised,
            state=step.state,
            chunk=step.chunk,
            encoded=self.encoded,
            seconds=seconds,
        )

    def _check_resume(self, state: State, total: int) -> None:
        if not isinstance(cast(object, state), State):
            raise ValueError(f"resume is of type {type(state).__name__}; it must be a State")
        if tuple(state.latents.shape) != self.encoded.shape:
            raise ValueError(f"the state has latents {tuple(state.latents.shape)}, this run has {self.encoded.shape}")
        if not 0 <= state.index <= total:
            raise ValueError(f"the state was saved after step {state.index}, this run has {total} steps")


def _check_cancel(cancel: Event | None, done: ImageStep | None) -> None:
    if cancel is not None and cancel.is_set():
        raise Cancelled(done)
