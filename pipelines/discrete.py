"""What the DDPM-type families (Stable Diffusion 1.5, XL) share: the scheduler that their checkpoint names."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from ..denoisers.guidance import ClassifierFree, Distilled, Guidance
from ..denoisers.unet_config import UNetConfig
from ..schedulers import DiscreteConfig, Sampler, Schedule, ScheduleMaker, sampler_for
from ..schedulers.discrete import DISCRETE, discrete_schedule
from .distilled import check_told, with_told
from .ends import DiscreteEnds
from .family import guidance_rescale, guidance_scale, num_steps
from .few_steps import FewSteps, few_steps
from .inpaint import MaskReader
from .parts import Parts
from .recipe import Recipe
from .request import Request
from .true_cfg import below_1


@dataclass(frozen=True, kw_only=True)
class DiscreteScheduler:
    """A scheduler_config.json of that kind: its options, as they are taken (`config`) and as they are written, and the
    sampler and the schedules that it names. `timesteps` are those of a run of so many steps, where the model was made
    for them."""

    config: DiscreteConfig
    sampler: Sampler
    make: ScheduleMaker
    timesteps: tuple[float, ...] | None = None
    options: Mapping[str, object]

    @classmethod
    def from_entries(cls, entries: Mapping[str, object]) -> Self:
        """Raises:
        ValueError: a scheduler of another kind, or one that is not supported.
        """
        sampler, make = sampler_for(entries)
        if entries.get("_class_name") not in DISCRETE:
            raise ValueError(f"scheduler_config.json: {entries.get('_class_name')} is for models of another kind")
        return cls(config=DiscreteConfig.from_entries(entries), sampler=sampler, make=make, options=entries)

    def entries(self) -> Mapping[str, object]:
        """Its options."""
        return self.options

    @property
    def ends(self) -> DiscreteEnds:
        """How runs begin and end."""
        return DiscreteEnds(self.config)

    def schedule(self, request: Request, recipe: Recipe) -> Schedule:
        """The steps that a request asks for, or its sigmas."""
        sigmas = request.sigmas
        if sigmas is None:
            steps = num_steps(request, recipe)
            if self.timesteps is not None and steps == len(self.timesteps):
                return discrete_schedule(self.config, steps, timesteps=self.timesteps)
            return self.make(steps)
        count = len(sigmas) - (len(sigmas) > 1 and sigmas[-1] == 0)
        return self.make(count, sigmas=sigmas)


def scheduler_of(
    parts: Parts,
    from_entries: Callable[[Mapping[str, object]], DiscreteScheduler],
    preset: Mapping[str, object],
    config: UNetConfig,
) -> tuple[DiscreteScheduler, FewSteps | None]:
    """The scheduler of a model of this config, and how it is run if it was distilled: its file, else `preset`, or what
    a distilled model brings."""
    found = parts.scheduler_config(from_entries, from_entries(preset))
    few = few_steps(parts.denoiser, found.config, told=config.time_cond_proj_dim is not None)
    if few is None or few.scheduler is None:
        return found, few
    return dataclasses.replace(from_entries(few.scheduler), timesteps=few.timesteps), few


def mask_reader(config: UNetConfig) -> MaskReader | None:
    """What a UNet that was made for inpainting reads beside its latents, a mask and a picture's latents; None for one
    of the general kind.

    Raises:
        ValueError: it reads something else beside them.
    """
    if config.beside_channels in (0, 1 + config.out_channels):
        return MaskReader() if config.beside_channels else None
    raise ValueError(
        f"the UNet reads {config.in_channels} channels and makes {config.out_channels}; it must read as many, or for "
        f"inpainting {1 + 2 * config.out_channels} (models that are told a picture or a depth are not supported)"
    )


def unet_recipe(
    defaults: Recipe, cells: int, scheduler: DiscreteScheduler, few: FewSteps | None, *, downsampling: int
) -> Recipe:
    """A family's defaults for latents of `cells` a side, or what a distilled model was made for; `downsampling` is the
    autoencoder's, and the largest size of `defaults` is told in such sides."""
    side = cells * downsampling
    general = dataclasses.replace(
        defaults,
        width=side,
        height=side,
        size_multiple=downsampling,
        min_size=downsampling,
        max_size=defaults.max_size * side,
        sampler=scheduler.sampler,
    )
    return general if few is None else few.recipe(general, downsampling)


@dataclass(frozen=True)
class ScaledGuidance:
    """Guidance by `guidance_scale`, as diffusers' pipelines of these families turn it on: classifier-free over 1.
    Models that are `told` the value (latent consistency models) make no second pass. `few`: how a distilled model is
    run."""

    told: bool
    few: FewSteps | None = None

    def check(self, request: Request) -> None:
        """Refuses a guidance object that tells a value to a model without that input, or none to one with it."""
        check_told(request, guided=self.told)

    def of(self, request: Request, recipe: Recipe) -> Guidance:
        """What a request asks for."""
        scale = guidance_scale(request, recipe)
        if request.guidance is not None:
            return with_told(request.guidance, scale if self.told else None)
        if self.told:
            return Distilled(scale)
        return ClassifierFree(scale, rescale=guidance_rescale(request, recipe)) if scale > 1 else ClassifierFree(1.0)

    def warnings(self, request: Request) -> tuple[str, ...]:
        """What a scale does not do, and what a distilled model was not made for."""
        scale, unlike = request.guidance_scale, () if self.few is None else self.few.warnings(request)
        return unlike if self.told else (*below_1("guidance_scale", scale), *unlike)


@dataclass(frozen=True, kw_only=True)
class DiscreteFamily:
    """What these families choose alike, whatever their prompts are read by."""

    scheduler: DiscreteScheduler
    guide: ScaledGuidance

    @property
    def draws_posterior(self) -> bool:
        """As the reference does."""
        return True

    def guidance(self, request: Request, recipe: Recipe) -> Guidance:
        """See `ScaledGuidance`."""
        return self.guide.of(request, recipe)

    def schedule(self, request: Request, recipe: Recipe, num_cells: int) -> Schedule:
        """The scheduler's."""
        return self.scheduler.schedule(request, recipe)

    def late(self, schedule: Schedule, strength: float) -> Schedule:
        """The last `int(n strength)` steps."""
        return schedule.starting_at(strength)

    def warnings(self, request: Request) -> tuple[str, ...]:
        """What an argument does not do here."""
        return self.guide.warnings(request)
