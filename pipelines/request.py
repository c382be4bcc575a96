"""One call's arguments, checked before anything is computed."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from ..denoisers.base import Conditioning, Prompt
from ..denoisers.guidance import Guidance
from ..language.expansion import PromptExpander
from ..schedulers.base import Sampler, Schedule
from .arguments import ImageArguments, check_names
from .conditions import Condition
from .request_checks import check_request
from .result import OutputType
from .texts import OTHER_NEGATIVES, OTHERS, OtherTexts, per_prompt
from .values import plain

if TYPE_CHECKING:
    from .arguments import Clips, PictureLists, Pictures

_NUMBERS = (
    *("height", "width", "num_frames", "num_inference_steps", "num_images_per_prompt", "num_videos_per_prompt"),
    *("guidance_scale", "guidance_scale_2", "true_cfg_scale", "guidance_rescale", "strength", "sigmas", "seed"),
    "max_sequence_length",
    *("cfg_normalization", "cfg_truncation", "clip_skip", "original_size", "target_size", "crops_coords_top_left"),
    *("aesthetic_score", "denoising_start", "denoising_end", "frame_rate", "decode_timestep", "decode_noise_scale"),
    "image_cond_noise_scale",
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
      or a file; or a list of such clips. Where clips are made chunk by chunk it is what they go on from: its frames are
      among `num_frames`, and come first in the result as they are.
    - `conditions`: pictures and clips that clips show at given frames (`Condition`), one or several; `image` is one at
      the first frame. `image_cond_noise_scale`: how much noise is added at each step to those of strength 1.
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
    conditions: Condition | Sequence[Condition] | None = None
    image_cond_noise_scale: float | None = None
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
        check_request(self)

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
    def given_conditions(self) -> tuple[Condition, ...]:
        """All that are given."""
        given = self.conditions
        return () if given is None else (given,) if isinstance(given, Condition) else tuple(given)

    @property
    def generators(self) -> tuple[torch.Generator, ...] | None:
        """One per picture, where they are given."""
        if self.generator is None:
            return None
        return tuple(self.generator) if isinstance(self.generator, Sequence) else (self.generator,)


def _merge_counts(request: Request) -> None:
    """`num_videos_per_prompt` is what it is another name of."""
    images, videos = request.num_images_per_prompt, request.num_videos_per_prompt
    if videos is None:
        return
    if images not in (1, videos):
        raise ValueError("num_images_per_prompt and num_videos_per_prompt are the same; give one of the two")
    object.__setattr__(request, "num_images_per_prompt", videos)


def _strings(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _is_given(value: object, default: object) -> bool:
    return value is not None and not (isinstance(value, int | str) and value == default)
