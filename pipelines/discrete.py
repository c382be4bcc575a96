"""What the DDPM-type families (Stable Diffusion 1.5, XL) share: the scheduler that their checkpoint names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from ..denoisers.guidance import ClassifierFree, Distilled, Guidance
from ..denoisers.unet_config import UNetConfig
from ..schedulers import DiscreteConfig, Sampler, Schedule, ScheduleMaker, sampler_for
from ..schedulers.discrete import DISCRETE
from .distilled import check_told, with_told
from .ends import DiscreteEnds
from .family import guidance_scale, num_steps
from .recipe import Recipe
from .request import Request
from .true_cfg import begins_above_1

BETAS = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "steps_offset": 1}
"""Of the published models' schedulers."""


@dataclass(frozen=True, kw_only=True)
class DiscreteScheduler:
    """A scheduler_config.json of that kind: its options, and the sampler and the schedules that it names."""

    config: DiscreteConfig
    sampler: Sampler
    make: ScheduleMaker

    @classmethod
    def from_entries(cls, entries: Mapping[str, object]) -> Self:
        """Raises:
        ValueError: a scheduler of another kind, or one that is not supported.
        """
        sampler, make = sampler_for(entries)
        if entries.get("_class_name") not in DISCRETE:
            raise ValueError(f"scheduler_config.json: {entries.get('_class_name')} is for models of another kind")
        return cls(config=DiscreteConfig.from_entries(entries), sampler=sampler, make=make)

    @property
    def ends(self) -> DiscreteEnds:
        """How runs begin and end."""
        return DiscreteEnds(self.config)

    def schedule(self, request: Request, recipe: Recipe) -> Schedule:
        """The steps that a request asks for, or its sigmas."""
        sigmas = request.sigmas
        if sigmas is None:
            return self.make(num_steps(request, recipe))
        count = len(sigmas) - (len(sigmas) > 1 and sigmas[-1] == 0)
        return self.make(count, sigmas=sigmas)


def refuse_further_channels(config: UNetConfig) -> None:
    """Raises ValueError for a UNet that reads a mask and a masked picture beside the latents."""
    if config.beside_channels:
        raise ValueError(
            f"the UNet reads {config.in_channels} channels and makes {config.out_channels}: models that were made for "
            "inpainting are not supported yet; those of the general kind inpaint as well"
        )


@dataclass(frozen=True)
class ScaledGuidance:
    """Guidance by `guidance_scale`, as diffusers' pipelines of these families turn it on: classifier-free over 1.
    Models that are `told` the value (latent consistency models) make no second pass."""

    told: bool

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
        rescale = recipe.guidance_rescale if request.guidance_rescale is None else request.guidance_rescale
        return ClassifierFree(scale, rescale=float(rescale)) if scale > 1 else ClassifierFree(1.0)

    def warnings(self, request: Request) -> tuple[str, ...]:
        """What a scale does not do."""
        scale = request.guidance_scale
        if scale is None or self.told or not 0 < scale < 1:
            return ()
        return (begins_above_1("guidance_scale", scale),)
