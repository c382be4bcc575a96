"""The names of all public arguments, and what is said about a wrong one."""

import difflib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from ..denoisers.base import Conditioning, Prompt
from ..denoisers.guidance import Guidance
from ..language.expansion import PromptExpander
from ..schedulers.base import Sampler, Schedule
from .conditions import Condition
from .from_diffusers import IN_CALLS
from .result import OutputType

if TYPE_CHECKING:
    import numpy
    from PIL.Image import Image

    Picture = Image | numpy.ndarray | Tensor | str | Path
    Pictures = Picture | Sequence[Picture]
    PictureLists = Sequence[Sequence[Picture]]
    Clips = Pictures | PictureLists


class ImageArguments(TypedDict, total=False):
    """The keyword arguments of picture pipelines; `Request` says what each means, a pipeline's family which of them it
    uses. None is the same as not given."""

    prompt_2: str | Sequence[str] | None
    prompt_3: str | Sequence[str] | None
    negative_prompt: str | Sequence[str] | None
    negative_prompt_2: str | Sequence[str] | None
    negative_prompt_3: str | Sequence[str] | None
    height: int | None
    width: int | None
    num_frames: int | None
    frame_rate: float | None
    num_inference_steps: int | None
    guidance_scale: float | None
    guidance_scale_2: float | None
    true_cfg_scale: float | None
    cfg_normalization: float | bool | None
    cfg_truncation: float | None
    guidance_rescale: float | None
    num_images_per_prompt: int
    num_videos_per_prompt: int | None
    image: "Pictures | PictureLists | None"
    last_image: "Pictures | None"
    video: "Clips | None"
    conditions: Condition | Sequence[Condition] | None
    image_cond_noise_scale: float | None
    mask_image: "Pictures | None"
    strength: float | None
    max_sequence_length: int | None
    clip_skip: int | None
    original_size: Sequence[int] | None
    target_size: Sequence[int] | None
    crops_coords_top_left: Sequence[int] | None
    aesthetic_score: float | None
    denoising_start: float | None
    denoising_end: float | None
    decode_timestep: float | None
    decode_noise_scale: float | None
    latents: Tensor | None
    sigmas: Sequence[float] | None
    output_type: OutputType
    generator: torch.Generator | Sequence[torch.Generator] | None
    seed: int | Sequence[int] | None
    conditioning: Prompt | Conditioning | None
    expand: PromptExpander | None
    guidance: Guidance | None
    sampler: Sampler | str | None
    schedule: Schedule | None


PUBLIC_ARGUMENTS = ImageArguments.__optional_keys__ | {"prompt", "control_image"}
"""All that a pipeline may ever be asked for, whichever family uses it."""


def check_names(given: Mapping[str, object], used: Collection[str], family: str) -> None:
    """Makes sure that a family uses every argument it is given.

    Raises:
        ValueError: an argument of other families, or an unknown one; the message names those used, what stands for one
            of diffusers', or the nearest.
    """
    for name in given:
        if name in used:
            continue
        if name in PUBLIC_ARGUMENTS:
            raise ValueError(f"{name}: {family} does not use this argument; it takes {', '.join(sorted(used))}")
        if name in IN_CALLS:
            raise ValueError(f"{name}: not an argument here; {IN_CALLS[name]}")
        like = nearest(name, used)
        told = f"did you mean {like}?" if like else f"there are {', '.join(sorted(used))}"
        raise ValueError(f"{name}: unknown argument; {told}")


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known name that is most like `name`, one that contains it or has most letters in common; None where none is
    like it."""
    containing = sorted((option for option in known if name in option), key=len)
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return next(iter((*containing, *close)), None)
