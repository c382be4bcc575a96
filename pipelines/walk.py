"""The loop over the steps of one run.

Legend: N pictures, C latent channels, h w latent cells.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from threading import Event
from typing import Any, cast

import torch
from torch import Tensor

from ..core.attention.base import AttentionSelector
from ..core.stream import Runner, run_blocks
from ..denoisers.base import Denoiser
from ..denoisers.guidance import Run
from ..denoisers.hoisting import HoistingModule
from ..schedulers import RowNoise
from ..schedulers.base import Schedule, Slope, State, Step
from .base import Cancelled, Encoded, ImageStep
from .ends import Ends
from .finite import CheckedRunner, NonFiniteBlockError, NonFiniteError, checked, is_finite
from .inpaint import Kept, latent_mask


@dataclass(frozen=True, kw_only=True, eq=False)
class Walk:
    """One run of one encoded request."""

    denoiser: Denoiser[Any]
    attention: AttentionSelector
    ends: Ends
    downsampling: int
    encoded: Encoded

    def steps(self, resume: State | None, cancel: Event | None) -> Iterator[ImageStep]:
        """See `ImagePipeline.denoise`."""
        schedule = self.encoded.plan.schedule
        total = 0 if schedule is None else self._total(schedule)
        if resume is not None:
            self._check_resume(resume, total)
        if schedule is None:
            return self._nothing_to_do(resume or self._unstarted(), total, cancel)
        if resume is not None and resume.index == total:
            return self._nothing_to_do(resume, total, cancel)
        return self._run(schedule, resume, cancel)

    def _total(self, schedule: Schedule) -> int:
        """The number of steps."""
        return schedule.num_steps

    def _shape_after(self, num_steps: int) -> tuple[int, ...]:
        """That of the latents when so many steps are done."""
        return self.encoded.shape

    def _own(self, latents: Tensor) -> Tensor:
        """The result's, of a state's latents."""
        return latents

    def _run(self, schedule: Schedule, resume: State | None, cancel: Event | None) -> Iterator[ImageStep]:
        """Gradients are off while a step is computed, and as the caller has them while it is looked at."""
        seconds = dict(self.encoded.seconds)
        stop_if_cancelled(cancel, None)
        start = time.perf_counter()
        with torch.no_grad():
            steps = self._steps(schedule, run_blocks, resume)
        seconds |= {"prepare": time.perf_counter() - start, "denoise": 0.0}
        previous, done = resume, None
        while True:
            stop_if_cancelled(cancel, done)
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

    def _steps(
        self, schedule: Schedule, runner: Runner, resume: State | None, check: Callable[[Slope], Slope] | None = None
    ) -> Iterator[Step]:
        """The sampler's steps; the same whenever it is called. `check` wraps the slope that it follows."""
        noise = RowNoise.resumed(self.encoded.noise, self.encoded.shape)
        x, drawn = self._start(schedule, noise)
        slope, kept = self._slope(schedule, runner), self._kept(drawn)
        slope = slope if kept is None else kept.slope(slope)
        sampler = self.encoded.plan.sampler
        steps = sampler(slope if check is None else check(slope), x, schedule, noise, resume)
        first = 0 if resume is None else resume.index
        return steps if kept is None else map(kept.step, steps, schedule.points[first + 1 :])

    def _start(self, schedule: Schedule, noise: RowNoise) -> tuple[Tensor, Tensor]:
        """Latents at the first point, and the initial noise; leaves `noise` as the sampler takes it on."""
        encoded, point = self.encoded, schedule.points[0]
        if encoded.handed is not None:
            return encoded.handed / self.ends.unit(point.sigma), encoded.handed
        drawn = noise.draw().to(encoded.device) if encoded.initial is None else encoded.initial
        for _ in range(encoded.num_skipped_draws):
            noise.draw()
        if encoded.source is None:
            return self.ends.noise_scale(schedule) * drawn, drawn
        return point.noised(encoded.source, drawn), drawn

    def _slope(self, schedule: Schedule, runner: Runner) -> Slope:
        plan = self.encoded.plan
        points = plan.sampler.evaluations(schedule)
        runner = self.denoiser.runner(runner) if isinstance(self.denoiser, HoistingModule) else runner
        run = Run(shape=self._shape_after(0), evaluations=points, attention=self.attention, runner=runner)
        return plan.guidance.bind(self.denoiser, self.encoded.prompt, run)

    def _kept(self, drawn: Tensor) -> Kept | None:
        """What the mask does not repaint; None where there is none, or the model is told it."""
        encoded, last = self.encoded, self.encoded.plan.full_schedule.points[-1]
        if encoded.mask is None or encoded.source is None or encoded.beside is not None:
            return None
        return Kept(
            x0=encoded.source,
            noise=drawn,
            repaint=latent_mask(encoded.mask.to(encoded.device), self.downsampling),
            last=last.index,
            clean=encoded.source / self.ends.unit(last.sigma),
        )

    def _find_cause(self, schedule: Schedule, previous: State | None, step: Step) -> None:
        """Takes the step again from where it began, with a check per block, and raises."""
        block = "and not when the step was run again"
        try:
            with torch.no_grad():
                again = next(self._steps(schedule, CheckedRunner(), previous, checked))
            if not (is_finite(again.latents) and is_finite(again.denoised)):
                block = f"in the sampler {self.encoded.plan.sampler.name}"
        except NonFiniteBlockError as error:
            block = error.block
        raise NonFiniteError("denoise", step.index, step.total, block)

    def _nothing_to_do(self, state: State, total: int, cancel: Event | None) -> Iterator[ImageStep]:
        stop_if_cancelled(cancel, None)
        schedule = self.encoded.plan.schedule
        sigma = 0.0 if schedule is None else schedule.points[-1].sigma
        latents = self._own(state.latents)
        step = Step(
            index=max(total - 1, 0),
            total=total,
            sigma=sigma,
            latents=latents,
            denoised=latents,
            state=state,
        )
        done = self._of_this_run(step, self.encoded.seconds)
        yield done
        stop_if_cancelled(cancel, done)

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
        if not 0 <= state.index <= total:
            raise ValueError(f"the state was saved after step {state.index}, this run has {total} steps")
        expected = self._shape_after(state.index)
        if tuple(state.latents.shape) != expected:
            raise ValueError(f"the state has latents {tuple(state.latents.shape)}, this run has {expected}")


def stop_if_cancelled(cancel: Event | None, done: ImageStep | None) -> None:
    """Raises Cancelled where `cancel` is set; `done` is the last step."""
    if cancel is not None and cancel.is_set():
        raise Cancelled(done)
