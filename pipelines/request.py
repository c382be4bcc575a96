"""One call's arguments, checked before anything is computed."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from ..denoisers.base import Conditioning, Prompt
from ..denoisers.guidance import Guidance
from ..language.expansion import PromptExpander
from ..schedulers.base import Sampler, Schedule
from .arguments import ImageArguments, check_names
from .checks import check_conditioning
from .result import OUTPUT_TYPES, OutputType
from .texts import OTHER_NEGATIVES, OTHERS, OtherTexts, per_prompt
from .values import is_instance, is_int, is_number, kind, plain

if TYPE_CHECKING:
    from .arguments import Clips, PictureLists, Pictures

MAX_SEED = 2**63 - 1
MAX_COUNT = 1000
_NUMBERS = (
    *("height", "width", "num_frames", "num_inference_steps", "num_images_per_prompt", "num_videos_per_prompt"),
    *("guidance_scale", "guidance_scale_2", "true_cfg_scale", "guidance_rescale", "strength", "sigmas", "seed"),
    "max_sequence_length",
    *("cfg_normalization", "cfg_truncation", "clip_skip", "original_size", "target_size", "crops_coords_top_left"),
    *("aesthetic_score", "denoising_start", "denoising_end", "frame_rate", "decode_timestep", "decode_noise_scale"),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """Arguments of a picture pipeline. None means "not given": the model's recipe decides; 0 and 0.0 are values.

    Pictures come in prompt-major order: `num_images_per_prompt` of the first prompt, then of the second.

    - `prompt`: one, or several. `negative_prompt`: one for all prompts, or one per prompt; "" where none is given.
    - `prompt_2`, `prompt_3`: other texts for the model's second and third text encoder, one for all prompts, or one per
      prompt; with a `negative_prompt` (which may be "") also `negative_prompt_2` and `negative_prompt_3`.
    - `height`, `width`: pixels; with an `image` its own size. `num_frames`: of each clip, where the model makes clips;
      `num_videos_per_prompt` is another name of `num_images_per_prompt` there.
    - `guidance_scale`, `guidance_rescale`: classifier-free guidance, or the value that a guidance-distilled model is
      told; `true_cfg_scale`: classifier-free guidance on top of that; or `guidance`, an object, instead of all three,
      and of Z-Image's `cfg_normalization` (a guided slope is at most so many times as long as the conditional one;
      True: 1, 0 or False: any length) and `cfg_truncation` in 0..1 (no guidance where less than 1 - it is noise).
      `guidance_scale_2`: that of a model's second expert, where the noise is weak; the first one's where not given.
    - `max_sequence_length`: tokens that the model's language encoder reads. `clip_skip`: layers of CLIP to leave out
      for `prompt` (not for `negative_prompt`, as diffusers does).
    - `original_size`, `target_size` (height, width) and `crops_coords_top_left` (y, x): pixels that SDXL is told; its
      refiner is told an `aesthetic_score` for the second.
    - `frame_rate`: frames a second, for models that are told this; clips are saved with it. `decode_timestep` and
      `decode_noise_scale`, in 0..1: what a decoder is told that takes noise away, and how much is mixed in before.
    - `denoising_end`: end after this share of the training time; the result's latents go on as the `image` of a run
      with that `denoising_start` (a base model, then its refiner).
    - `seed`: an int (further pictures count up from it), or one per picture; or `generator`, a CPU generator per
      picture, whose state is copied, never changed. Neither: a random seed, which the result records.
    - `image`: start from it (one for all, one per prompt, or one per picture): PIL, array [H, W, 3], tensor [3, H, W],
      floats in 0..1, or a file. `strength` in 0..1: how much of the schedule is run; 0 is the autoencoder's round trip.
      Models that edit look at it instead: at one picture, a list of them, or a list of lists, one for each prompt; with
      `strength` or `mask_image` they start from the first one as well. Clips begin with it, and end with `last_image`.
    - `video`: a clip to start from, with `strength`: its frames in a list, an array [F, H, W, 3], a tensor [F, 3, H, W]
      or a file; or a list of such clips. Where clips are made chunk by chunk it is what they go on from, and its frames
      are among `num_frames`.
    - `mask_image`: white (over a half) is painted anew, black keeps the image's pixels exactly. Same size as the image.
    - `latents` [N, C, F, h, w] or [N, C, h, w]: standard normal initial noise instead of drawing it.
    - `sigmas`: falling noise levels, or `schedule`, an object; `sampler`: an object or a name.
    - `conditioning`: encoded prompts (`Encoded.conditioning`) instead of `prompt`.
    - `expand`: a language model that rewrites each prompt first; the manifest keeps both.
    - `output_type`: "pil", "np" (float [N, H, W, 3]), "pt" (float [N, 3, H, W]), both in 0..1, of clips with an axis of
      frames after N, or "latent": nothing is decoded.

    Raises:
        ValueError: an argument is of the wrong type, out of range, or does not go with another one.
    """

    prompt: str | Sequence[str] | None = None
    prompt_2: str | Sequence[str] | None = None
    prompt_3: str | Sequence[str] | None = None
    negative_prompt: str | Sequence[str] | None = None
    negative_prompt_2: str | Sequence[str] | None = None
    negative_prompt_3: str | Sequence[str] | None = None
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    frame_rate: float | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    true_cfg_scale: float | None = None
    cfg_normalization: float | bool | None = None
    cfg_truncation: float | None = None
    guidance_rescale: float | None = None
    num_images_per_prompt: int = 1
    num_videos_per_prompt: int | None = None
    image: "Pictures | PictureLists | None" = None
    last_image: "Pictures | None" = None
    video: "Clips | None" = None
    mask_image: "Pictures | None" = None
    strength: float | None = None
    max_sequence_length: int | None = None
    clip_skip: int | None = None
    original_size: Sequence[int] | None = None
    target_size: Sequence[int] | None = None
    crops_coords_top_left: Sequence[int] | None = None
    aesthetic_score: float | None = None
    denoising_start: float | None = None
    denoising_end: float | None = None
    decode_timestep: float | None = None
    decode_noise_scale: float | None = None
    latents: Tensor | None = None
    sigmas: Sequence[float] | None = None
    output_type: OutputType = "pil"
    generator: torch.Generator | Sequence[torch.Generator] | None = None
    seed: int | Sequence[int] | None = None
    conditioning: Prompt | Conditioning | None = None
    expand: PromptExpander | None = None
    guidance: Guidance | None = None
    sampler: Sampler | str | None = None
    schedule: Schedule | None = None

    @classmethod
    def of(
        cls, prompt: str | Sequence[str] | None, arguments: ImageArguments, family: str, used: Collection[str]
    ) -> "Request":
        """The request of a call to a pipeline of `family`; a name that is not one of those `used` is a ValueError."""
        check_names(cast(Mapping[str, object], arguments), used, family)
        return cls(prompt=prompt, **arguments)

    def check_used(self, family: str, used: Collection[str]) -> None:
        """Makes sure that `family` uses every argument that is given.

        Raises:
            ValueError: it does not.
        """
        values: Mapping[str, object] = vars(self)
        given = [field.name for field in fields(self) if _is_given(values[field.name], field.default)]
        check_names(dict.fromkeys(given), {"prompt", *used}, family)

    def __post_init__(self) -> None:
        values: Mapping[str, object] = vars(self)
        for name in _NUMBERS:
            object.__setattr__(self, name, plain(values[name]))
        _merge_counts(self)
        for check in _CHECKS:
            check(self)

    @property
    def prompts(self) -> tuple[str, ...]:
        """Every prompt; empty where `conditioning` stands for them."""
        return _strings(self.prompt) if self.prompt is not None else ()

    @property
    def num_prompts(self) -> int:
        """P."""
        given = self.given_conditioning
        return given.positive.num_rows if given is not None else len(self.prompts)

    @property
    def num_images(self) -> int:
        """N = P times the images per prompt."""
        return self.num_prompts * self.num_images_per_prompt

    @property
    def negative_prompts(self) -> tuple[str, ...]:
        """One per prompt."""
        return per_prompt(self.negative_prompt, ("",) * self.num_prompts)

    @property
    def other_prompts(self) -> OtherTexts:
        """`prompt_2` and `prompt_3`, or the prompts themselves."""
        return OtherTexts.of(self.prompts, self.prompt_2, self.prompt_3)

    @property
    def other_negatives(self) -> OtherTexts:
        """`negative_prompt_2` and `negative_prompt_3`, or the negative prompts themselves."""
        return OtherTexts.of(self.negative_prompts, self.negative_prompt_2, self.negative_prompt_3)

    @property
    def given_others(self) -> dict[str, str | Sequence[str]]:
        """The texts for further text encoders that are given, by their argument."""
        texts = (self.prompt_2, self.prompt_3, self.negative_prompt_2, self.negative_prompt_3)
        named = zip((*OTHERS, *OTHER_NEGATIVES), texts, strict=True)
        return {name: text for name, text in named if text is not None}

    @property
    def given_conditioning(self) -> Prompt | None:
        """`conditioning` as a `Prompt`."""
        given = self.conditioning
        return Prompt(positive=given) if isinstance(given, Conditioning) else given

    @property
    def generators(self) -> tuple[torch.Generator, ...] | None:
        """One per picture, where they are given."""
        if self.generator is None:
            return None
        return tuple(self.generator) if isinstance(self.generator, Sequence) else (self.generator,)


def _check_prompts(request: Request) -> None:
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
    _check_negative(request)
    _check_others(request)


def _check_others(request: Request) -> None:
    for name, text in request.given_others.items():
        _check_strings(name, text)
        if name in OTHERS and request.prompt is None:
            raise ValueError(f"{name}: conditioning is given, which stands for it too; give one of the two")
        if name in OTHER_NEGATIVES and request.negative_prompt is None:
            raise ValueError(f'{name}: give a negative_prompt for the first text encoder as well; it may be ""')
        if not isinstance(text, str) and len(text) != request.num_prompts:
            raise ValueError(
                f"{len(text)} texts in {name} for {request.num_prompts} prompts; give one for all, or one per prompt"
            )


def _check_negative(request: Request) -> None:
    negative, given = request.negative_prompt, request.given_conditioning
    if negative is None:
        return
    _check_strings("negative_prompt", negative)
    if given is not None and given.negative is not None:
        raise ValueError("negative_prompt: conditioning already holds the negative rows; give one of the two")
    if not isinstance(negative, str) and len(negative) != request.num_prompts:
        raise ValueError(
            f"{len(negative)} negative prompts for {request.num_prompts} prompts; give one for all, or one per prompt"
        )


def _check_expand(request: Request) -> None:
    given = request.expand
    if given is None:
        return
    if not is_instance(given, PromptExpander):
        raise ValueError(f"expand is of type {kind(given)}; it must be a language model (calotype.load_language_model)")
    for name in (name for name in request.given_others if name in OTHERS):
        raise ValueError(f"expand: it rewrites the prompt alone; leave out {name}: all encoders read the result")
    if request.prompt is None:
        raise ValueError("expand: conditioning is given, so that there is no prompt to rewrite; give one of the two")


def _merge_counts(request: Request) -> None:
    """`num_videos_per_prompt` is what it is another name of."""
    images, videos = request.num_images_per_prompt, request.num_videos_per_prompt
    if videos is None:
        return
    if images not in (1, videos):
        raise ValueError("num_images_per_prompt and num_videos_per_prompt are the same; give one of the two")
    object.__setattr__(request, "num_images_per_prompt", videos)


def _check_counts(request: Request) -> None:
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


def _check_guidance(request: Request) -> None:
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
        if request.guidance is not None:
            raise ValueError(f"{name}: guidance, an object, already says it; give one of the two")
    if request.guidance_rescale is not None and not 0 <= request.guidance_rescale <= 1:
        raise ValueError(f"guidance_rescale is {request.guidance_rescale}; it must be from 0 to 1")
    if request.cfg_normalization is not None and request.cfg_normalization < 0:
        raise ValueError(f"cfg_normalization is {request.cfg_normalization}; it must be at least 0")
    if request.cfg_truncation is not None and not 0 <= request.cfg_truncation <= 1:
        raise ValueError(f"cfg_truncation is {request.cfg_truncation}; it must be from 0 to 1")


def _check_image(request: Request) -> None:
    if request.image is None:
        for name in ("mask_image", "last_image", "strength"):
            if vars(request)[name] is not None and not (name == "strength" and request.video is not None):
                raise ValueError(f"{name}: it needs an image to work on; give image as well")
    strength = request.strength
    if strength is not None and not (is_number(strength) and 0 <= strength <= 1):
        raise ValueError(f"strength is {strength!r}; it must be from 0 to 1")


def _check_seeds(request: Request) -> None:
    given = cast(object, request.generator)
    if not (given is None or isinstance(given, torch.Generator | Sequence)):
        raise ValueError(f"generator is {given!r}; it must be a torch.Generator on the CPU, or one per picture")
    seed, generators, count = request.seed, request.generators, request.num_images
    if seed is not None and generators is not None:
        raise ValueError("seed and generator: give one of the two")
    if seed is not None:
        seeds = (seed,) if not isinstance(seed, Sequence) else tuple(seed)
        for value in seeds:
            if not (is_int(value) and 0 <= value <= MAX_SEED - count):
                raise ValueError(f"seed is {value!r}; it must be a whole number from 0 to {MAX_SEED - count}")
        if isinstance(seed, Sequence) and len(seeds) != count:
            raise ValueError(
                f"{len(seeds)} seeds for {count} pictures; it takes one to count up from, or one per picture"
            )
    for generator in generators or ():
        if not isinstance(cast(object, generator), torch.Generator) or generator.device.type != "cpu":
            raise ValueError(f"generator is {generator!r}; it must be a torch.Generator on the CPU, or one per picture")
    if generators is not None and len(generators) != count:
        raise ValueError(f"{len(generators)} generators for {count} pictures; it takes one per picture, or use seed")
    if generators is not None and len({id(generator) for generator in generators}) < count:
        raise ValueError("generator: one is given for two pictures, whose noise would be the same; give each its own")


def _check_schedule(request: Request) -> None:
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
    num_given = schedule.num_steps if schedule is not None else _num_steps(sigmas) if sigmas is not None else steps
    if steps is not None and steps != num_given:
        name = "schedule" if schedule is not None else "sigmas"
        raise ValueError(f"num_inference_steps is {steps}, but {name} has {num_given} steps; give one of the two")


def _check_sampler(request: Request) -> None:
    given = request.sampler
    if not (given is None or isinstance(given, str) or is_instance(given, Sampler)):
        raise ValueError(f"sampler is {given!r}; it must be an object such as Heun(), or a name")


def _check_output(request: Request) -> None:
    if request.output_type not in OUTPUT_TYPES:
        raise ValueError(f"output_type is {request.output_type!r}; it must be one of {', '.join(OUTPUT_TYPES)}")
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


_LATENT_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_CHECKS: tuple[Callable[[Request], None], ...] = (
    _check_counts,
    _check_prompts,
    _check_expand,
    _check_guidance,
    _check_image,
    _check_seeds,
    _check_schedule,
    _check_sampler,
    _check_output,
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


def _strings(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _num_steps(sigmas: Sequence[float]) -> int:
    return len(sigmas) - 1 if sigmas[-1] == 0 else len(sigmas)


def _is_given(value: object, default: object) -> bool:
    return value is not None and not (isinstance(value, int | str) and value == default)
