"""Clips of Wan 2.1 made chunk by chunk in few steps (Self-Forcing): frames are ready while the rest is still made.

The weights and their names are Wan's own, so that nothing in a file says how it is run. A folder is known by its
pipeline's class or its denoiser's, whose config.json may say how long chunks are and what they see; a file by its
published name, at its beginning. Any other is made causal by `causal(pipe)`.

A chunk begins as noise; each step leads to x0, which is noised anew for the next one. Noise is drawn chunk by chunk, so
that a longer clip begins as a shorter one does. There is no guidance.

Source: Self-Forcing's CausalInferencePipeline, FastVideo's WanCausalDMDPipeline.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.naming import naming
from ..denoisers.causal import Chunks
from ..denoisers.causal_wan import CLASS_NAME, CausalWan, check_reads_text
from ..denoisers.guidance import Guidance, Unguided
from ..denoisers.wan import WanDenoiser
from ..denoisers.wan_config import TEXT_TOKENS, WanConfig
from ..schedulers import Schedule, flow_schedule, flow_schedule_from_sigmas
from ..schedulers.self_forcing import SELF_FORCING, SelfForcingConfig
from .family import COMMON, OF_CLIPS, STARTING, num_steps
from .folders import config_of
from .frames import FirstLatents
from .image import ImagePipeline
from .origin import Origin, chosen
from .parts import Parts
from .recipe import Recipe
from .request import Request
from .text_options import check_text
from .wan_text import WanTexts

PIPELINE = "WanCausalDMDPipeline"
"""FastVideo's class."""
PUBLISHED = re.compile("self_forcing_(dmd|sid)")
"""The beginnings of files' names, in small letters, with "_" for "-"."""
STEPS = 4


@dataclass(frozen=True, kw_only=True)
class CausalWanFamily(WanTexts):
    """The choices of Wan's causal models. `begins_with_picture`: whether clips can, because their first chunk is a
    single frame."""

    scheduler: SelfForcingConfig
    begins_with_picture: bool = False

    @property
    def arguments(self) -> frozenset[str]:
        """All common ones but those for starting from a picture, and these."""
        own = {"max_sequence_length", "video"} | ({"image"} if self.begins_with_picture else set[str]())
        return (COMMON - STARTING) | OF_CLIPS | own

    def check(self, request: Request) -> None:
        """The text's length is within what the model was made for, nothing asks for guidance, and chunks end clean."""
        check_text(request, longest=TEXT_TOKENS)
        scale, guidance, schedule = request.guidance_scale, request.guidance, request.schedule
        if scale is not None and scale > 1:
            raise ValueError(f"guidance_scale is {scale}; this model runs without guidance: leave it out, or give 1")
        if not (guidance is None or isinstance(guidance, Unguided)):
            raise ValueError(f"guidance is {guidance}; this model runs without guidance: leave it out")
        if schedule is not None and schedule.sigmas[-1] > 0:
            raise ValueError(
                f"schedule ends at sigma {schedule.sigmas[-1]:g}; chunks must be finished: it must end at 0"
            )

    def guidance(self, request: Request, recipe: Recipe) -> Guidance:
        """None."""
        return Unguided()

    def schedule(self, request: Request, recipe: Recipe, num_cells: int) -> Schedule:
        """Equal steps from 1, or the given sigmas, shifted."""
        if request.sigmas is not None:
            return flow_schedule_from_sigmas(request.sigmas, self.scheduler.shift)
        return flow_schedule(num_steps(request, recipe), self.scheduler.shift)

    def index(self) -> Mapping[str, Any]:
        """See `IndexedFamily`."""
        return {"_class_name": PIPELINE}

    def warnings(self, request: Request) -> tuple[str, ...]:
        """What the model was not made for."""
        scale, steps, found = request.guidance_scale, request.num_inference_steps, list[str]()
        if scale not in (None, 0, 1):
            found.append(f"guidance_scale {scale} has no effect: this model runs without guidance")
        if steps not in (None, STEPS):
            found.append(f"num_inference_steps {steps}: this model was made for {STEPS}")
        return tuple(found)


def causal(pipe: ImagePipeline, chunks: Chunks | None = None, *, shift: float | None = None) -> ImagePipeline:
    """A pipeline over the same weights, whose clips are made chunk by chunk: for weights that were trained so, whose
    files do not say it, or with other `chunks` (None: 3 latent frames each, which see all before them).

    `shift`: of the steps; None is that of a causal pipeline that is given, else 5.

    Raises:
        ValueError: not a pipeline of Wan that makes clips from text by one denoiser, or a shift that is not positive.
    """
    network = pipe.denoiser.network if isinstance(pipe.denoiser, CausalWan) else pipe.denoiser
    if not isinstance(network, WanDenoiser):
        kind = type(network).__name__
        raise ValueError(f"{pipe.source.name} has a {kind}; clips are made chunk by chunk by a WanDenoiser alone")
    own = pipe.family.scheduler if isinstance(pipe.family, CausalWanFamily) else SelfForcingConfig()
    denoiser = CausalWan(network=network, chunks=Chunks() if chunks is None else chunks)
    alone = denoiser.chunks.independent_first_frame
    scheduler = own if shift is None else SelfForcingConfig(shift=shift)
    made = dataclasses.replace(
        pipe,
        denoiser=denoiser,
        family=CausalWanFamily(scheduler=scheduler, begins_with_picture=alone),
        recipe=dataclasses.replace(pipe.recipe, num_inference_steps=STEPS, guidance_scale=1.0, sampler="lcm"),
        looking=FirstLatents() if alone else None,
    )
    return made if pipe.origin is None else dataclasses.replace(made, origin=_origin(made, scheduler, pipe.origin))


def chunks_told(parts: Parts) -> Chunks | None:
    """How clips are made by these parts, by the rule in the module's first lines; None: whole."""
    entries = config_of(parts.denoiser)
    if entries is None:
        return Chunks() if PUBLISHED.match(_plain(parts.denoiser)) else None
    classes = (parts.index_entries().get("_class_name"), entries.get("_class_name"))
    return Chunks.from_entries(entries) if PIPELINE in classes or CLASS_NAME in classes else None


def check_causal(name: str, config: WanConfig, boundary: float | None) -> None:
    """Makes sure, before weights are read, that the denoiser of `name` makes clips chunk by chunk. ValueError for two
    experts, or one that reads pictures."""
    if boundary is not None:
        experts = f"{name} has two experts (its boundary_ratio is {boundary:g})"
        raise ValueError(f"{experts}; clips are made chunk by chunk by one denoiser alone")
    with naming(name):
        check_reads_text(config)


def shift_told(parts: Parts) -> float:
    """That of a scheduler of Self-Forcing; another one beside a causal denoiser is its base model's, and 5 is taken."""

    def read(entries: Mapping[str, Any]) -> SelfForcingConfig:
        is_own = entries.get("_class_name") == SELF_FORCING
        return SelfForcingConfig.from_entries(entries) if is_own else SelfForcingConfig()

    return parts.scheduler_config(read, SelfForcingConfig()).shift


def _plain(file: Path) -> str:
    return file.name.lower().replace("-", "_")


def _origin(made: ImagePipeline, scheduler: SelfForcingConfig, origin: Origin) -> Origin:
    """What was loaded, with the choices of a pipeline that was made causal."""
    replaced = (origin.layout.denoiser, origin.layout.scheduler)
    index = {name: value for name, value in origin.index.items() if name not in replaced}
    return dataclasses.replace(
        origin, index={**index, "_class_name": PIPELINE}, scheduler=scheduler.entries(), chosen=chosen(made)
    )
