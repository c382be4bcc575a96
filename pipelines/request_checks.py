"""What a request's arguments are made sure of, each for itself and beside the others."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from ..denoisers.base import Conditioning, Prompt
from ..denoisers.guidance import Guidance
from ..language.expansion import PromptExpander
from ..schedulers.base import Sampler, Schedule
from .checks import check_conditioning
from .conditions import Condition
from .result import OUTPUT_TYPES
from .texts import OTHER_NEGATIVES, OTHERS
from .values import is_instance, is_int, is_number, kind

if TYPE_CHECKING:
    from .request import Request

MAX_SEED = 2**63 - 1
MAX_COUNT = 1000
_LATENT_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def check_request(request: "Request") -> None:
    """Refuses arguments that are of the wrong type, out of range, or do not go with another one.

    Raises:
        ValueError: one is.
    """
    for check in _CHECKS:
        check(request)


def _check_counts(request: "Request") -> None:
    for name, value in (
        ("height", request.height),
        ("width", request.width),
        ("num_frames", request.num_frames),
        ("num_inference_steps", request.num_inference_steps),
        ("num_images_per_prompt", request.num_images_per_prompt),
        ("max_sequence_length", request.max_sequence_length),
        ("clip_skip", request.clip_skip),
    ):
        optional = name != "num_images_per_prompt"
        if not (is_int(value) or (optional and value is None)):
            raise ValueError(f"{name} is {value!r}; it must be a whole number")
    for name, value in (
        ("num_frames", request.num_frames),
        ("num_inference_steps", request.num_inference_steps),
        ("num_images_per_prompt", request.num_images_per_prompt),
    ):
        if value is not None and not 1 <= value <= MAX_COUNT:
            raise ValueError(f"{name} is {value}; it must be from 1 to {MAX_COUNT}")


def _check_prompts(request: "Request") -> None:
    """The prompts, or the conditioning in their place."""
    given = request.conditioning
    if given is not None and not isinstance(cast(object, given), Prompt | Conditioning):
        raise ValueError(f"conditioning is of type {kind(given)}; it must be a Prompt or a Conditioning")
    if (request.prompt is None) == (given is None):
        raise ValueError("give either prompt or conditioning" + (", not both" if given is not None else ""))
    if request.prompt is not None:
        _check_strings("prompt", request.prompt)
    elif request.num_prompts < 1:
        raise ValueError("conditioning has no rows; it takes one per prompt")
    both = request.given_conditioning
    for part in () if both is None else (both.positive, both.negative):
        if part is not None:
            check_conditioning(part)


def _check_negative(request: "Request") -> None:
    negative, given = request.negative_prompt, request.given_conditioning
    if negative is None:
        return
    _check_strings("negative_prompt", negative)
    if given is not None and given.negative is not None:
        raise ValueError("negative_prompt: conditioning already holds the negative rows; give one of the two")
    _check_per_prompt("negative prompts", negative, request.num_prompts)


def _check_others(request: "Request") -> None:
    """The texts for further text encoders."""
    for name, text in request.given_others.items():
        _check_strings(name, text)
        if name in OTHERS and request.prompt is None:
            raise ValueError(f"{name}: conditioning is given, which stands for it too; give one of the two")
        if name in OTHER_NEGATIVES and request.negative_prompt is None:
            raise ValueError(f'{name}: give a negative_prompt for the first text encoder as well; it may be ""')
        _check_per_prompt(f"texts in {name}", text, request.num_prompts)


def _check_expand(request: "Request") -> None:
    given = request.expand
    if given is None:
        return
    if not is_instance(given, PromptExpander):
        raise ValueError(f"expand is of type {kind(given)}; it must be a language model (calotype.load_language_model)")
    for name in (name for name in request.given_others if name in OTHERS):
        raise ValueError(f"expand: it rewrites the prompt alone; leave out {name}: all encoders read the result")
    if request.prompt is None:
        raise ValueError("expand: conditioning is given, so that there is no prompt to rewrite; give one of the two")


def _check_guidance(request: "Request") -> None:
    given = request.guidance
    if not (given is None or is_instance(given, Guidance)):
        raise ValueError(f"guidance is {given!r}; it must be an object such as ClassifierFree(3.0)")
    scales = ("guidance_scale", "guidance_scale_2", "true_cfg_scale")
    for name in (*scales, "guidance_rescale", "cfg_normalization", "cfg_truncation"):
        value: float | None = vars(request)[name]
        if value is None:
            continue
        if not (is_number(value) or (name == "cfg_normalization" and isinstance(value, bool))):
            raise ValueError(f"{name} is {value!r}; it must be a finite number")
        if given is not None:
            raise ValueError(f"{name}: guidance, an object, already says it; give one of the two")
    if request.cfg_normalization is not None and request.cfg_normalization < 0:
        raise ValueError(f"cfg_normalization is {request.cfg_normalization}; it must be at least 0")
    for name, value in (("guidance_rescale", request.guidance_rescale), ("cfg_truncation", request.cfg_truncation)):
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}; it must be from 0 to 1")


def _check_start(request: "Request") -> None:
    """The arguments that need a picture or a clip to start from."""
    if request.image is None:
        for name in ("mask_image", "last_image", "strength"):
            if vars(request)[name] is not None and not (name == "strength" and request.video is not None):
                raise ValueError(f"{name}: it needs an image to work on; give image as well")
    strength = request.strength
    if strength is not None and not (is_number(strength) and 0 <= strength <= 1):
        raise ValueError(f"strength is {strength!r}; it must be from 0 to 1")


def _check_conditions(request: "Request") -> None:
    """Pictures and clips at frames."""
    given, scale = cast(object, request.conditions), request.image_cond_noise_scale
    if scale is not None and not (is_number(scale) and scale >= 0):
        raise ValueError(f"image_cond_noise_scale is {scale!r}; it must be a number from 0 on")
    if given is None and scale is not None and request.image is None:
        raise ValueError("image_cond_noise_scale: it is noise of what clips show; give image or conditions as well")
    if given is None:
        return
    each = cast(Sequence[object], given) if isinstance(given, list | tuple) else (given,)
    if not each:
        raise ValueError("conditions is an empty list; it takes at least one calotype.Condition")
    for item in each:
        if not isinstance(item, Condition):
            raise ValueError(
                f"conditions holds a {kind(item)}; it takes calotype.Condition(image=...), with a frame_index"
            )
    if request.image is not None:
        raise ValueError("image and conditions: image is a condition at frame 0; give one of the two")


def _check_seeds(request: "Request") -> None:
    given, seed, count = cast(object, request.generator), request.seed, request.num_images
    if not (given is None or isinstance(given, torch.Generator | Sequence)):
        raise ValueError(f"generator is {given!r}; it must be a torch.Generator on the CPU, or one per picture")
    if seed is not None and given is not None:
        raise ValueError("seed and generator: give one of the two")
    if seed is None:
        return
    seeds = (seed,) if not isinstance(seed, Sequence) else tuple(seed)
    for value in seeds:
        if not (is_int(value) and 0 <= value <= MAX_SEED - count):
            raise ValueError(f"seed is {value!r}; it must be a whole number from 0 to {MAX_SEED - count}")
    if isinstance(seed, Sequence) and len(seeds) != count:
        raise ValueError(f"{len(seeds)} seeds for {count} pictures; it takes one to count up from, or one per picture")


def _check_generators(request: "Request") -> None:
    generators, count = request.generators, request.num_images
    if generators is None:
        return
    for generator in generators:
        if not isinstance(cast(object, generator), torch.Generator) or generator.device.type != "cpu":
            raise ValueError(f"generator is {generator!r}; it must be a torch.Generator on the CPU, or one per picture")
    if len(generators) != count:
        raise ValueError(f"{len(generators)} generators for {count} pictures; it takes one per picture, or use seed")
    if len({id(generator) for generator in generators}) < count:
        raise ValueError("generator: one is given for two pictures, whose noise would be the same; give each its own")


def _check_schedule(request: "Request") -> None:
    sigmas, schedule, steps = request.sigmas, request.schedule, request.num_inference_steps
    if schedule is not None and not isinstance(cast(object, schedule), Schedule):
        raise ValueError(f"schedule is of type {kind(schedule)}; it must be a Schedule")
    if sigmas is not None and schedule is not None:
        raise ValueError("sigmas and schedule: give one of the two")
    if sigmas is not None and not isinstance(cast(object, sigmas), Sequence):
        raise ValueError(f"sigmas is of type {kind(sigmas)}; it must be a list of numbers")
    if sigmas is not None and not (len(sigmas) and all(is_number(value) for value in sigmas)):
        raise ValueError(f"sigmas is {list(sigmas)}; it must be a list of at least one finite number")
    if sigmas is not None and _num_steps(sigmas) < 1:
        raise ValueError(f"sigmas is {list(sigmas)}; it must begin with a number above 0")
    for i, (sigma, following) in enumerate(pairwise(sigmas or ())):
        if sigma == following:
            raise ValueError(f"sigmas[{i}] and sigmas[{i + 1}] are both {sigma:g}; noise levels must fall")
    num_given = schedule.num_steps if schedule is not None else _num_steps(sigmas) if sigmas is not None else steps
    if steps is not None and steps != num_given:
        name = "schedule" if schedule is not None else "sigmas"
        raise ValueError(f"num_inference_steps is {steps}, but {name} has {num_given} steps; give one of the two")


def _check_sampler(request: "Request") -> None:
    given = request.sampler
    if not (given is None or isinstance(given, str) or is_instance(given, Sampler)):
        raise ValueError(f"sampler is {given!r}; it must be an object such as Heun(), or a name")


def _check_output(request: "Request") -> None:
    if request.output_type not in OUTPUT_TYPES:
        raise ValueError(f"output_type is {request.output_type!r}; it must be one of {', '.join(OUTPUT_TYPES)}")


def _check_latents(request: "Request") -> None:
    latents = cast(object, request.latents)
    if latents is None:
        return
    if not isinstance(latents, Tensor) or latents.ndim not in (4, 5) or latents.dtype not in _LATENT_DTYPES:
        raise ValueError(f"latents is {kind(latents)}; it must be a float tensor [N, C, F, h, w] or [N, C, h, w]")
    if latents.layout is not torch.strided or latents.is_meta:
        raise ValueError("latents is a sparse tensor, or one without values; it must be a dense one")
    if latents.shape[0] != request.num_images:
        raise ValueError(
            f"latents has {latents.shape[0]} rows for {request.num_images} pictures; it takes one per picture"
        )
    if not bool(latents.isfinite().all()):
        raise ValueError("latents holds values that are not finite")


_CHECKS: "tuple[Callable[[Request], None], ...]" = (
    _check_counts,
    _check_prompts,
    _check_negative,
    _check_others,
    _check_expand,
    _check_guidance,
    _check_start,
    _check_conditions,
    _check_seeds,
    _check_generators,
    _check_schedule,
    _check_sampler,
    _check_output,
    _check_latents,
)


def _check_strings(name: str, value: object) -> None:
    if isinstance(value, str):
        return
    if not isinstance(value, Sequence):
        raise ValueError(f"{name} is of type {kind(value)}; it must be a string or a list of strings")
    if not value:
        raise ValueError(f"{name} is an empty list; it takes at least one string")
    for item in cast(Sequence[object], value):
        if not isinstance(item, str):
            raise ValueError(f"{name} holds {item!r} of type {kind(item)}; it must be a string or a list of strings")


def _check_per_prompt(texts: str, given: str | Sequence[str], num_prompts: int) -> None:
    """Makes sure that there is one text for all prompts, or one for each; `texts` says in words what they are."""
    if not isinstance(given, str) and len(given) != num_prompts:
        raise ValueError(f"{len(given)} {texts} for {num_prompts} prompts; give one for all, or one per prompt")


def _num_steps(sigmas: Sequence[float]) -> int:
    return len(sigmas) - 1 if sigmas[-1] == 0 else len(sigmas)
