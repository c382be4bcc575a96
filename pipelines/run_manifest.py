"""The manifest of one run of a pipeline."""

from typing import TYPE_CHECKING

from torch import Tensor

from ..denoisers.base import Prompt
from .chunked import chunks_of
from .edit import begins_with_image
from .manifest import Manifest, Task, digest_input
from .plan import Plan, used_generators
from .request import Request

if TYPE_CHECKING:
    from .image import ImagePipeline

INPUTS = ("image", "last_image", "mask_image", "latents", "video")
"""Arguments of which the manifest keeps digests, as they are given."""


def manifest_of_run(pipe: "ImagePipeline", request: Request, plan: Plan) -> Manifest:
    """What a pipeline made of a request, by its plan."""
    given = request.given_conditioning
    inputs: dict[str, object] = {name: vars(request)[name] for name in INPUTS}
    inputs["conditions"] = [each.shown for each in request.given_conditions] or None
    inputs["conditioning"] = None if given is None else prompt_tensors(given)
    inputs["generator"] = [each.get_state() for each in used_generators(request)] or None
    extra = dict(pipe.family.described(request))
    extra |= {name: list(texts) for name, texts in plan.other_texts.items()}
    extra |= {"num_frames": plan.num_frames} if plan.is_clip else {}
    return Manifest.build(
        family=pipe.source.family,
        model=pipe.source.name,
        weights=pipe.source.weights,
        task=_task(pipe, request, plan),
        prompts=plan.prompts,
        unexpanded=plan.unexpanded,
        negative_prompts=plan.negative_prompts,
        seeds=plan.seeds,
        width=plan.width,
        height=plan.height,
        schedule=plan.full_schedule,
        sampler=plan.sampler,
        guidance=plan.guidance,
        strength=plan.strength,
        inputs={name: digest_input(value) for name, value in inputs.items() if value is not None},
        dtype=pipe.dtype,
        device=pipe.device,
        attention=",".join(backend.name for backend in pipe.attention.backends),
        num_images_per_prompt=request.num_images_per_prompt,
        extra=extra,
        chunks=chunks_of(pipe.denoiser),
    )


def prompt_tensors(prompt: Prompt) -> list[Tensor]:
    """All that a prompt holds, for both sides."""
    parts = (prompt.positive,) if prompt.negative is None else (prompt.positive, prompt.negative)
    each = (
        (
            *(part.states, part.lengths, part.pooled, part.time_ids, part.picture_states),
            *(part.other_states, part.other_lengths, *part.references),
        )
        for part in parts
    )
    return [tensor for tensors in each for tensor in tensors if tensor is not None]


def _task(pipe: "ImagePipeline", request: Request, plan: Plan) -> Task:
    if request.video is not None or any(each.video is not None for each in request.given_conditions):
        return "video-to-video"
    if plan.is_clip:
        shows = request.image is not None or request.given_conditions
        return "image-to-video" if shows else "text-to-video"
    if request.mask_image is not None:
        return "inpaint"
    if request.image is None:
        return "text-to-image"
    return "edit" if pipe.editing is not None and not begins_with_image(request) else "image-to-image"
