"""What the parity tests of Stable Diffusion's families share."""

import copy
import dataclasses
from typing import Any

import numpy
import torch
from parity import error

from calotype.pipelines.discrete import DiscreteScheduler
from calotype.pipelines.image import ImagePipeline

from .. import tiny_sd

IGNORED = ("ignore::DeprecationWarning", "ignore::FutureWarning")  # diffusers' own
SIZE = {"height": 40, "width": 56}  # 5 x 7 latent cells
PICTURE = torch.rand(3, 40, 56, generator=torch.Generator().manual_seed(0))
MASK = torch.zeros(1, 40, 56)
MASK[:, 16:32, 8:40] = 1


def ours_with(pipe: ImagePipeline, name: str) -> ImagePipeline:
    """The pipeline with another scheduler."""
    kind, options = tiny_sd.SCHEDULERS[name]
    scheduler = DiscreteScheduler.from_entries({"_class_name": kind, **options})
    return dataclasses.replace(
        pipe,
        family=dataclasses.replace(pipe.family, scheduler=scheduler),
        ends=scheduler.ends,
        recipe=dataclasses.replace(pipe.recipe, sampler=scheduler.sampler),
        denoiser=predicting(pipe.denoiser, scheduler.config.prediction_type),
    )


def predicting(denoiser: Any, prediction: str) -> Any:
    """The denoiser with its prediction read in another way."""
    other = copy.copy(denoiser)
    other.prediction = prediction
    return other


def theirs_as(pipe: Any, kind: type, name: str | None = None, **settings: Any) -> Any:
    """diffusers' pipeline of another kind over the same parts, with another scheduler."""
    parts = dict(pipe.components)
    if name is not None:
        parts["scheduler"] = tiny_sd.scheduler(name)
    other = kind(**parts, **settings)
    other.set_progress_bar_config(disable=True)
    return other


def reference(pipe: Any, **arguments: Any) -> tuple[list[torch.Tensor], numpy.ndarray]:
    """Each step's latents and the pictures [N, H, W, 3] of a diffusers pipeline."""
    steps: list[torch.Tensor] = []

    def keep(_: Any, index: int, time: Any, values: dict[str, Any]) -> dict[str, Any]:
        steps.append(values["latents"][:, :, None].clone())
        return values

    pictures = pipe(**arguments, output_type="np", callback_on_step_end=keep).images
    return steps, pictures


def check(
    ours: ImagePipeline, theirs: Any, mine: dict[str, Any], other: dict[str, Any], repaint: torch.Tensor | None = None
) -> None:
    """Latents of every step within 1e-5; pixels, where they are painted, within 1e-4."""
    steps, pictures = reference(theirs, **other)
    found = list(ours.stream(**mine, output_type="np"))
    if ours.recipe.sampler.name == "pndm" and len(found) > 1:
        steps = steps[1:]  # the first two are one step's
    assert len(found) == len(steps)
    for step, expected in zip(found, steps, strict=True):
        assert error(step.latents * ours.ends.unit(step.sigma), expected) < 1e-5
    difference = numpy.abs(numpy.asarray(ours.decode(found[-1]).images) - pictures)
    assert (difference if repaint is None else difference[:, repaint[0] > 0]).max() < 1e-4
