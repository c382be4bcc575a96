"""Distilled UNets, which make a picture in few steps: Turbo, Lightning, Hyper-SD and DMD2, without guidance; latent
consistency models, which are told a value, as their configs say.

The others' configs are those of the models that they were distilled from. So a single file is known by its published
name, at its beginning, and then has that model's scheduler, also in a folder that has another one, and once it was
saved as a folder, whose config.json names it. Another folder is known by its scheduler: Euler's method, plain or
ancestral, at "trailing" timesteps, of a model that predicts noise, is what Turbo's folders hold, and what Lightning's
card asks for. Models that were made for guidance name other schedulers; for one that does not, give `guidance_scale`
and `num_inference_steps`, which are followed, with a warning.

Source: the model cards of stabilityai/sdxl-turbo, stabilityai/sd-turbo, ByteDance/SDXL-Lightning, ByteDance/Hyper-SD
and tianweiy/DMD2.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..schedulers import DiscreteConfig
from .folders import NAME, config_of
from .recipe import Recipe
from .request import Request

BETAS = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "steps_offset": 1}
"""Of the published models' schedulers."""
TRAILING = {**BETAS, "_class_name": "EulerDiscreteScheduler", "timestep_spacing": "trailing"}
ANCESTRAL = {**TRAILING, "_class_name": "EulerAncestralDiscreteScheduler"}
CONSISTENT = {**BETAS, "_class_name": "LCMScheduler"}


@dataclass(frozen=True, kw_only=True)
class FewSteps:
    """How a distilled model is run: in `num_inference_steps`; it was made for `min_steps` to `max_steps`.

    `scheduler` are the entries of its scheduler_config.json, None where the checkpoint has its own. `timesteps` are
    what it is told in a run of `num_inference_steps`, None where the scheduler says it. `cells`: latent cells a side of
    a picture whose size is not given, None where the UNet's config says it. `guidance_scale` is the value that it is
    told, 0 where there is none; `strength` that of image-to-image.
    """

    title: str
    max_steps: int
    min_steps: int = 1
    num_inference_steps: int = 4
    scheduler: Mapping[str, Any] | None
    timesteps: tuple[float, ...] | None = None
    cells: int | None = None
    guidance_scale: float = 0.0
    strength: float = 0.5

    def recipe(self, general: Recipe, downsampling: int) -> Recipe:
        """That of the model that it was distilled from, changed; `downsampling` is the autoencoder's."""
        side = None if self.cells is None else self.cells * downsampling
        return dataclasses.replace(
            general,
            width=side or general.width,
            height=side or general.height,
            num_inference_steps=self.num_inference_steps,
            guidance_scale=self.guidance_scale,
            strength=self.strength,
        )

    def warnings(self, request: Request) -> tuple[str, ...]:
        """What a request asks for that the model was not made for."""
        scale, steps, found = request.guidance_scale, request.num_inference_steps, list[str]()
        if scale is not None and scale > 1 and self.guidance_scale == 0:
            found.append(f"guidance_scale {scale}: this model ({self.title}) was made to run without guidance, at 0")
        if steps is not None and not self.min_steps <= steps <= self.max_steps:
            made = str(self.max_steps) if self.min_steps == self.max_steps else f"{self.min_steps} to {self.max_steps}"
            found.append(f"num_inference_steps {steps}: this model ({self.title}) was made for {made}")
        return tuple(found)


def many_steps(request: Request, made: int) -> tuple[str, ...]:
    """What to tell of a request for more than twice the steps that a model was `made` for: cards differ by one or so,
    and a few more do no harm."""
    steps = request.num_inference_steps
    if steps is None or steps <= 2 * made:
        return ()
    return (f"num_inference_steps {steps}: this model was made for {made}",)


def few_steps(denoiser: Path, scheduler: DiscreteConfig, *, told: bool = False) -> FewSteps | None:
    """What a file or folder of a denoiser holds, by the rule in the module's first lines; `scheduler` is that beside
    it, `told` whether the model is told a guidance value. None for a model that was made for many steps."""
    if told:
        return CONSISTENCY
    name = _file_name(denoiser).lower().replace("-", "_")
    published = next((each for pattern, each in PUBLISHED if re.match(pattern, name)), None)
    return BY_SCHEDULER if published is None and denoiser.is_dir() and _is_trailing(scheduler) else published


def _file_name(denoiser: Path) -> str:
    """That of the file; of a folder, that of the file whose denoiser was saved there, if it was one."""
    named = (config_of(denoiser) or {}).get(NAME, "") if denoiser.is_dir() else denoiser.name
    return Path(str(named)).name if str(named).endswith((".safetensors", ".gguf")) else ""


def _is_trailing(scheduler: DiscreteConfig) -> bool:
    by_euler = scheduler.scheduler in ("EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler")
    trailing = scheduler.timestep_spacing == "trailing" and scheduler.prediction_type == "epsilon"
    return by_euler and trailing and not scheduler.rescale_betas_zero_snr


def _lightning(steps: int) -> FewSteps:
    """The one for a single step predicts the picture itself."""
    scheduler = TRAILING if steps > 1 else {**TRAILING, "prediction_type": "sample"}
    return FewSteps(
        title="SDXL Lightning", num_inference_steps=steps, min_steps=steps, max_steps=steps, scheduler=scheduler
    )


def _at(title: str, *timesteps: float) -> FewSteps:
    """A model that was made for these timesteps alone."""
    n = len(timesteps)
    return FewSteps(
        title=title, num_inference_steps=n, min_steps=n, max_steps=n, scheduler=CONSISTENT, timesteps=timesteps
    )


CONSISTENCY = FewSteps(
    title="a latent consistency model", max_steps=8, scheduler=None, guidance_scale=8.5, strength=0.8
)
"""diffusers' defaults."""
BY_SCHEDULER = FewSteps(title="distilled, by its scheduler", max_steps=8, scheduler=None)
PUBLISHED: tuple[tuple[str, FewSteps], ...] = (
    ("sd_?xl_turbo", FewSteps(title="SDXL Turbo", max_steps=4, scheduler=ANCESTRAL, cells=64)),
    ("sd_turbo", FewSteps(title="SD Turbo", max_steps=4, scheduler=TRAILING, cells=64)),
    *((f"sdxl_lightning_{n}step", _lightning(n)) for n in (1, 2, 4, 8)),
    ("hyper_sdxl_1step_unet", _at("Hyper-SDXL", 800)),
    ("dmd2_sdxl_1step_unet", _at("DMD2", 399)),
    ("dmd2_sdxl_4step_unet", _at("DMD2", 999, 749, 499, 249)),
)
"""By the beginnings of their files' names, in small letters, with "_" for "-"."""
