"""A request and a recipe, put together: every choice of a run, before anything is computed."""

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..denoisers.causal import Chunks
from ..denoisers.guidance import ClassifierFree, Distilled, Guidance
from ..schedulers import Sampler, Schedule, sampler_by_name
from ..vae.frames import next_frames
from .chunked import chunked_frames, given_warnings, num_unseen
from .edit import References, begins_with_image
from .ends import Ends
from .family import Family
from .pictures import read_masks, read_pictures, read_videos, size_text, spread, stacked
from .recipe import Recipe
from .request import Request
from .result import OutputType
from .texts import OTHERS, per_prompt
from .timed_decoding import TimedDecoding, decoding_of
from .true_cfg import leads_away


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """The request's pictures or clips: `pixels` [K, 3, F, H, W], `mask` [M, 1, 1, H, W], and which of them each picture
    takes."""

    pixels: Tensor
    rows: tuple[int, ...]
    mask: Tensor | None
    mask_rows: tuple[int, ...]

    def after(self, count: int) -> "Inputs":
        """The same clips without their first `count` frames."""
        return dataclasses.replace(self, pixels=self.pixels[:, :, count:])

    @property
    def each_pixels(self) -> Tensor:
        """[N, 3, F, H, W], those of each picture that is made."""
        return self.pixels[list(self.rows)]

    @property
    def each_mask(self) -> Tensor | None:
        """[N, 1, 1, H, W], as `each_pixels`."""
        return None if self.mask is None else self.mask[list(self.mask_rows)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Every choice of a run. One entry per picture in `prompts`, `negative_prompts`, `seeds`, and `rows` (its prompt's
    number).

    `schedule` is what is run of `full_schedule`: its end where `strength` is below 1, None where it is 0; the part
    between `denoising_start` and `denoising_end`. `negative_prompts` are None where none are given, or the guidance
    needs none; `unexpanded` are the prompts before a language model rewrote them, None where none did; `other_texts`
    are those for further text encoders that are given, by their argument, one per picture. `num_frames` are asked for:
    the first of those that `latent_frames` stand for; a single one is a picture, unless `is_clip`; `frame_rate` are
    those that a second shows, where that is asked for. `num_given` are those of a clip that goes on: they come first in
    the result as they are, and the model does not see the first `num_unseen` of them, nor do latents stand for these.
    `decoding`: what a decoder is told that is told a time.
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
    other_texts: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    num_frames: int = 1
    latent_frames: int = 1
    num_given: int = 0
    num_unseen: int = 0
    is_clip: bool = False
    frame_rate: float | None = None
    decoding: TimedDecoding | None = None

    @property
    def num_images(self) -> int:
        """N."""
        return len(self.seeds)


def make_plan(
    request: Request,
    recipe: Recipe,
    inputs: Inputs | None,
    references: References | None = None,
    *,
    family: Family,
    ends: Ends,
    downsampling: int,
    group: int = 1,
    chunks: Chunks | None = None,
) -> Plan:
    """The plan of a request; `downsampling` is the pixels a side per latent cell, `group` the frames of a latent frame
    after the first. With `chunks` a clip is made by them, and goes on from one that is given.

    Raises:
        ValueError: a size or a schedule that the model cannot do, or an unknown sampler.
    """
    width, height = _size(request, recipe, inputs, references)
    num_frames, made_frames = _frames(request, recipe, inputs, chunks, group)
    latent_frames = 1 + (made_frames - 1) // group
    num_given = 0 if inputs is None or chunks is None else inputs.pixels.shape[2]
    num_cells = latent_frames * (width // downsampling) * (height // downsampling)
    full = _schedule(request, recipe, family, ends, num_cells)
    strength = None if inputs is None or chunks is not None else _strength(request, recipe)
    run = full if strength is None else family.late(full, strength) if strength > 0 else None
    guidance = family.guidance(request, recipe)
    rows = tuple(prompt for prompt in range(request.num_prompts) for _ in range(request.num_images_per_prompt))
    prompts, negatives, others = _texts(request, rows, needs_negative=guidance.needs_negative)
    return Plan(
        width=width,
        height=height,
        prompts=prompts,
        negative_prompts=negatives,
        rows=rows,
        seeds=_seeds(request),
        full_schedule=full,
        schedule=None if run is None else ends.part(run, request.denoising_start, request.denoising_end),
        sampler=_sampler(request, recipe),
        guidance=guidance,
        strength=strength,
        output_type=request.output_type,
        other_texts=others,
        num_frames=num_frames,
        latent_frames=latent_frames,
        num_given=num_given,
        num_unseen=num_unseen(num_given, group),
        is_clip=asks_for_clip(request, recipe),
        frame_rate=request.frame_rate,
        decoding=decoding_of(family, request),
        warnings=(
            *_cut_frames(num_frames, made_frames),
            *(() if chunks is None else given_warnings(num_given, chunks, group)),
            *_warnings(request, family, guidance),
            *family.warnings(request),
            *(() if references is None else references.warnings),
        ),
    )


def asks_for_clip(request: Request, recipe: Recipe) -> bool:
    """Whether results are clips: a model that makes pictures too makes one where frames, or another clip, are given."""
    return recipe.num_frames > 1 or not (request.num_frames is None and request.video is None)


def read_inputs(request: Request, references: References | None = None, *, looks: bool = False) -> Inputs | None:
    """The pictures or clips that a request starts from, None where it starts from noise; an editing one starts from the
    first of its pictures, one that `looks` at its picture from none.

    Raises:
        ValueError: not pictures, of different sizes, or a number of them that fits neither prompts nor pictures.
    """
    counts = (request.num_prompts, request.num_images_per_prompt)
    if request.video is not None:
        clips = read_videos(request.video)
        return Inputs(pixels=clips, rows=spread(clips, "video", *counts), mask=None, mask_rows=())
    if request.image is None or looks or (references is not None and not begins_with_image(request)):
        return None
    pixels = read_pictures(request.image) if references is None else stacked(references.firsts, "image")
    mask = None if request.mask_image is None else read_masks(request.mask_image)
    if mask is not None and mask.shape[-2:] != pixels.shape[-2:]:
        raise ValueError(f"mask_image is {size_text(mask)} and image is {size_text(pixels)}; they must be of one size")
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


def _size(request: Request, recipe: Recipe, inputs: Inputs | None, references: References | None) -> tuple[int, int]:
    default_width, default_height = (recipe.width, recipe.height) if references is None else references.size
    if inputs is not None:
        default_height, default_width = inputs.pixels.shape[-2:]
    width = default_width if request.width is None else request.width
    height = default_height if request.height is None else request.height
    given = "image" if request.video is None else "video"
    if inputs is not None and (width, height) != (default_width, default_height):
        raise ValueError(
            f"{given} is {size_text(inputs.pixels)} and {width}x{height} was asked for; they must be the same"
        )
    prefix = "" if inputs is None else f"{given}'s "
    return recipe.check_side(f"{prefix}width", width), recipe.check_side(f"{prefix}height", height)


def _strength(request: Request, recipe: Recipe) -> float:
    if request.strength is not None:
        return float(request.strength)
    if request.mask_image is not None and recipe.inpaint_strength is not None:
        return recipe.inpaint_strength
    return recipe.strength


def _schedule(request: Request, recipe: Recipe, family: Family, ends: Ends, num_cells: int) -> Schedule:
    if request.schedule is None:
        return family.schedule(request, recipe, num_cells)
    if request.schedule.path != ends.path:
        raise ValueError(
            f"schedule is on the {request.schedule.path} path; this model needs one on the {ends.path} path"
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


def _texts(
    request: Request, rows: Sequence[int], *, needs_negative: bool
) -> tuple[tuple[str, ...], tuple[str, ...] | None, dict[str, tuple[str, ...]]]:
    """Prompts, negative prompts and other texts, one per picture, as `Plan` has them."""
    empty = ("",) * request.num_prompts
    prompts, negatives = request.prompts or empty, request.negative_prompts
    has_negative = needs_negative and request.negative_prompt is not None
    others = {
        name: per_prompt(text, empty) for name, text in request.given_others.items() if has_negative or name in OTHERS
    }
    return (
        tuple(prompts[row] for row in rows),
        tuple(negatives[row] for row in rows) if has_negative else None,
        {name: tuple(texts[row] for row in rows) for name, texts in others.items()},
    )


def _frames(
    request: Request, recipe: Recipe, inputs: Inputs | None, chunks: Chunks | None, group: int
) -> tuple[int, int]:
    """How many are asked for, and how many are made."""
    if chunks is None:
        num_frames = _num_frames(request, recipe, inputs)
        return num_frames, next_frames(num_frames, group)
    num_frames = _num_frames(request, recipe, None)
    given = int(request.image is not None) if inputs is None else inputs.pixels.shape[2]
    name = "image" if request.video is None else "video"
    return num_frames, chunked_frames(num_frames, given, chunks, group, name=name)


def _num_frames(request: Request, recipe: Recipe, inputs: Inputs | None) -> int:
    """Those that are asked for, or the clip's."""
    if inputs is None:
        return recipe.check_frames("num_frames is", request.num_frames or recipe.num_frames)
    given, found = "image" if request.video is None else "video", inputs.pixels.shape[2]
    if request.num_frames not in (None, found):
        raise ValueError(f"num_frames is {request.num_frames}, but {given} has {found}; leave it out, or cut the clip")
    return recipe.check_frames(f"frames of {given} are", found)


def _cut_frames(num_frames: int, made_frames: int) -> tuple[str, ...]:
    if num_frames == made_frames:
        return ()
    return (f"num_frames {num_frames}: the model makes {made_frames}, of which the first {num_frames} are returned",)


def _warnings(request: Request, family: Family, guidance: Guidance) -> tuple[str, ...]:
    warnings: list[str] = []
    says_no = any(request.negative_prompts) or not request.other_negatives.are_empty
    if says_no and not guidance.needs_negative:
        asked_by = "; true_cfg_scale over 1 asks for one" if "true_cfg_scale" in family.arguments else ""
        warnings.append(f"negative_prompt has no effect: this guidance makes no unconditional pass{asked_by}")
    warnings += _negative_scale(request, guidance)
    for generator in used_generators(request):
        seed = generator.initial_seed()
        warnings.append(f"the generator of seed {seed} had been drawn from: that seed alone makes another picture")
    return tuple(warnings)


def _negative_scale(request: Request, guidance: Guidance) -> tuple[str, ...]:
    """What `guidance_scale` does below 0, where it does something."""
    scale = request.guidance_scale
    if scale is None or scale >= 0:
        return ()
    if isinstance(guidance, Distilled) and guidance.scale is not None:
        return (f"guidance_scale {scale} is negative: the model was made to be told values from 0 on",)
    is_followed = isinstance(guidance, ClassifierFree) and guidance.scale < 0
    return (leads_away("guidance_scale", scale),) if is_followed else ()
