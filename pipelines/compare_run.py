"""A run that is compared with one of diffusers' pipelines: what both are asked for, and how its stages are found."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..encoders.decoder import DecoderEncoder
from ..encoders.t5 import T5Encoder
from .files import open_image
from .image import ImagePipeline

REFERENCES, BESIDE, TIMES, SIGMAS = "reference latents", "latents beside", "timesteps", "sigmas"

Trace = Mapping[str, Tensor]
"""What came out of each stage, by its name and in order, rows first."""
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call."""
Tokens = Mapping[str, Sequence[Any]]
"""The ids of the prompt, maybe in chunks, by the role of its encoder."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What both sides are asked for; sizes, steps and frames that are None are the model's own. `images` are files to
    look at, or, for a refiner, the one to start from, or those that a clip begins and ends with."""

    prompt: str
    width: int | None = None
    height: int | None = None
    num_inference_steps: int | None = None
    num_frames: int | None = None
    seed: int = 0
    images: tuple[Path, ...] = ()


def _as_it_is(ours: ImagePipeline) -> ImagePipeline:
    return ours


def _nothing_more(asked: Mapping[str, Any]) -> Mapping[str, Any]:
    return {}


def _no_tokens(ours: ImagePipeline, run: Run) -> Tokens:
    return {}


@contextmanager
def by_callback(pipe: Any, steps: list[Tensor]) -> Generator[Mapping[str, Any]]:
    """Pipelines show their latents after each step."""

    def keep(_: object, index: int, time: object, values: dict[str, Any]) -> dict[str, Any]:
        steps.append(values["latents"].detach().clone())
        return values

    yield {"callback_on_step_end": keep}


@contextmanager
def by_scheduler(pipe: Any, steps: list[Tensor]) -> Generator[Mapping[str, Any]]:
    """Pipelines that show nothing: what their scheduler makes of each step."""
    step = pipe.scheduler.step

    def keep(*args: Any, **kwargs: Any) -> Any:
        made = step(*args, **kwargs)
        steps.append(made[0].detach().clone())
        return made

    pipe.scheduler.step = keep
    try:
        yield {}
    finally:
        del pipe.scheduler.step


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """What is special about one of diffusers' pipelines.

    `told` finds the prompt's conditioning among the arguments of the denoiser's first call, by the names of our fields;
    `arguments` have both sides do what a user gets who says nothing, and refuse what the pipeline does not take;
    `levels` finds the noise levels of a run, and the times that the denoiser was told, in the scheduler and in the
    denoiser's calls. `ready` makes ours do what diffusers does where the two are known to differ. `read` are ids that
    encoders do not show of prompts alone. Pictures to look at are `patch` x `patch` cells a token. `watched` has a
    pipeline's latents kept after each step of a run, which takes what it gives as well. `untold` are fields that
    diffusers has in another form, which steps alone show. `more` is what diffusers is asked for besides what both are,
    so that it does the same. `made` is what it calls the result.
    """

    told: Callable[[Call], Trace]
    arguments: Callable[[ImagePipeline, Run], Mapping[str, Any]]
    levels: Callable[[Any, Sequence[Call]], Trace]
    ready: Callable[[ImagePipeline], ImagePipeline] = _as_it_is
    read: Callable[[ImagePipeline, Run], Tokens] = _no_tokens
    patch: int = 1
    watched: Callable[[Any, list[Tensor]], AbstractContextManager[Mapping[str, Any]]] = by_callback
    untold: frozenset[str] = frozenset()
    more: Callable[[Mapping[str, Any]], Mapping[str, Any]] = _nothing_more
    made: str = "images"


def num_steps(ours: ImagePipeline, run: Run) -> int:
    """Steps of a run."""
    return run.num_inference_steps or ours.recipe.num_inference_steps


def flow_levels(scheduler: Any, calls: Sequence[Call]) -> Trace:
    """All sigmas, with the end."""
    sigmas: Tensor = scheduler.sigmas
    return {SIGMAS: sigmas.float()[None]}


def sized(ours: ImagePipeline, run: Run) -> dict[str, Any]:
    """The size, and the prompt alone."""
    if run.images:
        raise ValueError(f"{run.images[0]}: this pipeline of {ours.source.family} makes pictures of prompts alone")
    return {"width": run.width or ours.recipe.width, "height": run.height or ours.recipe.height}


def guided(ours: ImagePipeline, run: Run) -> Mapping[str, Any]:
    """The recipe's guidance, and the number of tokens that are read."""
    return {**sized(ours, run), "guidance_scale": ours.recipe.guidance_scale, **lengths(ours)}


def opened(run: Run) -> list[Any]:
    """The pictures of a run."""
    return [open_image(path).convert("RGB") for path in run.images]


def lengths(ours: ImagePipeline) -> Mapping[str, Any]:
    """The tokens that the longest encoder reads."""
    found = [each.max_tokens for each in ours.encoders.values() if isinstance(each, T5Encoder | DecoderEncoder)]
    return {"max_sequence_length": max(found)} if found else {}
