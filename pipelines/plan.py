"""A request and a recipe, put together: every choice of a run, before anything is computed."""

import secrets
from dataclasses import dataclass

import torch
from torch import Tensor

from ..denoisers.guidance import Guidance
from ..schedulers import Path, Sampler, Schedule, sampler_by_name
from .family import Family
from .pictures import read_masks, read_pictures, size_text, spread
from .recipe import Recipe
from .request import Request
from .result import OutputType

FAMILY_PATH: Path = "flow"


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """The request's pictures: `pixels` [K, 3, 1, H, W], `mask` [M, 1, 1, H, W], and which of them each picture
    takes."""

    pixels: Tensor
    rows: tuple[int, ...]
    mask: Tensor | None
    mask_rows: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Every choice of a run. One entry per picture in `prompts`, `negative_prompts`, `seeds`, and `rows` (its prompt's
    number).

    `schedule` is what is run of `full_schedule`: its end where `strength` is below 1, None where it is 0.
    `negative_prompts` are None where the guidance needs none; `unexpanded` are the prompts before a language model
    rewrote them, None where none did; `second_prompts` are the texts in `prompt_2`, None where it is not given.
    """

    width: int
    height: int
    prompts: tuple[str, ...]
    negative_prompts: tuple[str, ...] | None
    rows: tuple[int, ...]
    seeds: tuple[int, ...]
    full_schedule: Schedule
    schedule: Schedule | None
    sampler: Sampler
    guidance: Guidance
    strength: float | None
    output_type: OutputType
    warnings: tuple[str, ...]
    unexpanded: tuple[str, ...] | None = None
    second_prompts: tuple[str, ...] | None = None

    @property
    def num_images(self) -> int:
        """N."""
        return len(self.seeds)


def make_plan(request: Request, recipe: Recipe, inputs: Inputs | None, *, family: Family, downsampling: int) -> Plan:
    """The plan of a request; `downsampling` is the pixels a side per latent cell.

    Raises:
        ValueError: a size or a schedule that the model cannot do, or an unknown sampler.
    """
    width, height = _size(request, recipe, inputs)
    full = _schedule(request, recipe, family, (width // downsampling) * (height // downsampling))
    strength = None if inputs is None else float(recipe.strength if request.strength is None else request.strength)
    guidance = family.guidance(request, recipe)
    rows = tuple(prompt for prompt in range(request.num_prompts) for _ in range(request.num_images_per_prompt))
    prompts = request.prompts or ("",) * request.num_prompts
    negatives = request.negative_prompts
    return Plan(
        width=width,
        height=height,
        prompts=tuple(prompts[row] for row in rows),
        negative_prompts=tuple(negatives[row] for row in rows) if guidance.needs_negative else None,
        rows=rows,
        seeds=_seeds(request),
        full_schedule=full,
        schedule=full if strength is None else family.late(full, strength) if strength > 0 else None,
        sampler=_sampler(request, recipe),
        guidance=guidance,
        strength=strength,
        output_type=request.output_type,
        second_prompts=None if request.prompt_2 is None else tuple(request.second_prompts[row] for row in rows),
        warnings=(*_warnings(request, guidance), *family.warnings(request)),
    )


def read_inputs(request: Request) -> Inputs | None:
    """The pictures of a request, None for text-to-image.

    Raises:
        ValueError: not pictures, of different sizes, or a number of them that fits neither prompts nor pictures.
    """
    if request.image is None:
        return None
    pixels = read_pictures(request.image)
    mask = None if request.mask_image is None else read_masks(request.mask_image)
    if mask is not None and mask.shape[-2:] != pixels.shape[-2:]:
        raise ValueError(f"mask_image is {size_text(mask)} and image is {size_text(pixels)}; they must be of one size")
    counts = (request.num_prompts, request.num_images_per_prompt)
    return Inputs(
        pixels=pixels,
        rows=spread(pixels, "image", *counts),
        mask=mask,
        mask_rows=() if mask is None else spread(mask, "mask_image", *counts),
    )


def generator_states(request: Request, seeds: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Each picture's generator state: a copy of the given generator's, else that of its seed."""
    generators = request.generators or tuple(torch.Generator().manual_seed(seed) for seed in seeds)
    return tuple(generator.get_state() for generator in generators)


def used_generators(request: Request) -> tuple[torch.Generator, ...]:
    """The given generators that are not in the state of a seed, from which a request could draw the same."""
    return tuple(generator for generator in request.generators or () if not _is_fresh(generator))


def _is_fresh(generator: torch.Generator) -> bool:
    return torch.equal(generator.get_state(), torch.Generator().manual_seed(generator.initial_seed()).get_state())


def _size(request: Request, recipe: Recipe, inputs: Inputs | None) -> tuple[int, int]:
    default_width, default_height = (recipe.width, recipe.height)
    if inputs is not None:
        default_height, default_width = inputs.pixels.shape[-2:]
    width = default_width if request.width is None else request.width
    height = default_height if request.height is None else request.height
    if inputs is not None and (width, height) != (default_width, default_height):
        raise ValueError(
            f"image is {size_text(inputs.pixels)} and {width}x{height} was asked for; they must be the same"
        )
    prefix = "" if inputs is None else "image's "
    return recipe.check_side(f"{prefix}width", width), recipe.check_side(f"{prefix}height", height)


def _schedule(request: Request, recipe: Recipe, family: Family, num_cells: int) -> Schedule:
    if request.schedule is None:
        return family.schedule(request, recipe, num_cells)
    if request.schedule.path != FAMILY_PATH:
        raise ValueError(
            f"schedule is on the {request.schedule.path} path; this model needs one on the {FAMILY_PATH} path"
        )
    return request.schedule


def _sampler(request: Request, recipe: Recipe) -> Sampler:
    chosen = recipe.sampler if request.sampler is None else request.sampler
    return sampler_by_name(chosen) if isinstance(chosen, str) else chosen


def _seeds(request: Request) -> tuple[int, ...]:
    if request.generators is not None:
        return tuple(generator.initial_seed() for generator in request.generators)
    if request.seed is not None and not isinstance(request.seed, int):
        return tuple(request.seed)
    first = secrets.randbelow(2**32) if request.seed is None else request.seed
    return tuple(first + i for i in range(request.num_images))


def _warnings(request: Request, guidance: Guidance) -> tuple[str, ...]:
    warnings: list[str] = []
    if any(request.negative_prompts) and not guidance.needs_negative:
        warnings.append("negative_prompt has no effect: this guidance makes no unconditional pass")
    for generator in used_generators(request):
        seed = generator.initial_seed()
        warnings.append(f"the generator of seed {seed} had been drawn from: that seed alone makes another picture")
    return tuple(warnings)
