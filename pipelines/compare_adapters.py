"""What is special about each of diffusers' pipelines, where a run of one is compared with ours."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..denoisers import flux, qwen_image
from ..encoders.vision_language import VisionLanguageEncoder
from .compare_clips import CLIPS
from .compare_run import (
    REFERENCES,
    SIGMAS,
    TIMES,
    Adapter,
    Call,
    Run,
    Tokens,
    Trace,
    flow_levels,
    guided,
    lengths,
    num_steps,
    opened,
    sized,
)
from .image import ImagePipeline
from .pictures import read_lists
from .qwen_image_edit import QwenImageEditing, with_positions


def adapter_of(pipeline: str) -> Adapter:
    """That of a pipeline of diffusers. ValueError where there is none."""
    if pipeline not in ADAPTERS:
        raise ValueError(f"a {pipeline} cannot be compared; what can is {', '.join(ADAPTERS)}")
    return ADAPTERS[pipeline]


def _keywords(*names: tuple[str, str], row: int = 0) -> Callable[[Call], Trace]:
    """Reads keyword arguments, (ours, theirs) each, of which one row is the prompt's."""

    def told(call: Call) -> Trace:
        return {ours: call[1][theirs][row:][:1] for ours, theirs in names}

    return told


def _z_image_told(call: Call) -> Trace:
    """The third argument is a list of texts, the prompts' first."""
    return {"states": call[0][2][0][None]}


def _kv_told(call: Call) -> Trace:
    """In the first call the pictures' tokens come first, and are counted."""
    told = {"states": call[1]["encoder_hidden_states"][:1]}
    count: int = call[1].get("num_ref_tokens", 0)
    return {**told, REFERENCES: call[1]["hidden_states"][:1, :count]} if count else told


def _unet_told(call: Call) -> Trace:
    """The prompts' rows are the last; numbers and pooled vectors are in a dictionary of their own, if there are any."""
    added: Mapping[str, Tensor] = call[1]["added_cond_kwargs"] or {}
    names = {"text_embeds": "pooled", "time_ids": "time_ids"}
    found = {"states": call[1]["encoder_hidden_states"]} | {names[name]: value for name, value in added.items()}
    return {name: value[-1:] for name, value in found.items()}


def _discrete_levels(scheduler: Any, calls: Sequence[Call]) -> Trace:
    """The times that the UNet was told, its second argument, each once (PNDM comes to its second one twice), and the
    noise levels there, without the end."""
    times = torch.stack([torch.as_tensor(call[0][1]).float() for call in calls]).unique_consecutive()
    if "sigmas" in vars(scheduler):
        sigmas: Tensor = scheduler.sigmas[-1 - len(times) : -1]
    else:
        a: Tensor = scheduler.alphas_cumprod[times.long()]
        sigmas = ((1 - a) / a).sqrt()
    return {TIMES: times[None], SIGMAS: sigmas.float()[None]}


def _qwen_guided(ours: ImagePipeline, run: Run) -> Mapping[str, Any]:
    """Both need a negative prompt to be guided at all."""
    scale = ours.recipe.guidance_scale
    return {**sized(ours, run), "true_cfg_scale": scale, "negative_prompt": " ", **lengths(ours)}


def _flux2_guided(ours: ImagePipeline, run: Run) -> Mapping[str, Any]:
    """Pictures to look at, where there are any."""
    if not run.images:
        return guided(ours, run)
    return {**_looked_at(run), "guidance_scale": ours.recipe.guidance_scale, **lengths(ours)}


def _kv_guided(ours: ImagePipeline, run: Run) -> Mapping[str, Any]:
    """The same without guidance, for which diffusers has no argument."""
    return {name: value for name, value in _flux2_guided(ours, run).items() if name != "guidance_scale"}


def _kontext_guided(ours: ImagePipeline, run: Run) -> Mapping[str, Any]:
    """At most one picture to look at, which does not give the size."""
    if len(run.images) > 1:
        raise ValueError(f"{len(run.images)} pictures; this pipeline changes one")
    picture = {"image": opened(run)[0]} if run.images else {}
    return {**guided(ours, dataclasses.replace(run, images=())), **picture}


def _at_their_size(asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """diffusers makes all pictures of about this area."""
    return {"max_area": asked["width"] * asked["height"]}


def _qwen_edit_guided(ours: ImagePipeline, run: Run) -> Mapping[str, Any]:
    """As Qwen-Image, with pictures, which diffusers asks for."""
    if not run.images:
        raise ValueError("there is no picture; this pipeline of diffusers asks for one or more to look at")
    return {**_looked_at(run), "true_cfg_scale": ours.recipe.guidance_scale, "negative_prompt": " "}


def _qwen_first_edit_guided(ours: ImagePipeline, run: Run) -> Mapping[str, Any]:
    """The same with one picture, which diffusers takes alone."""
    if len(run.images) > 1:
        raise ValueError(f"{len(run.images)} pictures; this pipeline changes one")
    found = _qwen_edit_guided(ours, run)
    return {**found, "image": found["image"][0]}


def _refining(ours: ImagePipeline, run: Run) -> Mapping[str, Any]:
    """A picture to start from, and at least one step."""
    if len(run.images) != 1 or (run.width, run.height) != (None, None):
        raise ValueError(f"{len(run.images)} pictures; this pipeline starts from one, whose size it keeps")
    strength = min(1.0, max(ours.recipe.strength, 1.5 / num_steps(ours, run)))
    return {"image": opened(run), "strength": strength, "guidance_scale": ours.recipe.guidance_scale}


def _looked_at(run: Run) -> dict[str, Any]:
    """Pictures, which give the size where none is asked for."""
    sides = {"width": run.width, "height": run.height}
    return {"image": opened(run), **{name: side for name, side in sides.items() if side is not None}}


def _diffusers_positions(ours: ImagePipeline) -> ImagePipeline:
    """What the language model sees stands where diffusers 0.42 has it."""
    return with_positions(ours, "diffusers")


def _seen(ours: ImagePipeline, run: Run) -> Tokens:
    """The prompt after its pictures."""
    encoder, editing = ours.encoders["llm"], ours.editing
    assert isinstance(encoder, VisionLanguageEncoder)
    assert isinstance(editing, QwenImageEditing)
    (pictures,) = read_lists(opened(run))
    return {"llm": encoder.tokens([run.prompt], [[editing.small(picture) for picture in pictures]])[0][0]}


_STATES, _POOLED = ("states", "encoder_hidden_states"), ("pooled", "pooled_projections")
_SEEN = (REFERENCES, "hidden_states")
_FLUX2 = Adapter(told=_keywords(_STATES, _SEEN), arguments=_flux2_guided, levels=flow_levels)
_QWEN_EDIT = Adapter(
    told=_keywords(_STATES, _SEEN),
    arguments=_qwen_edit_guided,
    levels=flow_levels,
    ready=_diffusers_positions,
    read=_seen,
    patch=qwen_image.PATCH,
)
_FLUX = Adapter(told=_keywords(_STATES, _POOLED), arguments=guided, levels=flow_levels)
_UNET = Adapter(told=_unet_told, arguments=guided, levels=_discrete_levels)
ADAPTERS: Mapping[str, Adapter] = {
    "FluxPipeline": _FLUX,
    "FluxKontextPipeline": dataclasses.replace(
        _FLUX,
        told=_keywords(_STATES, _POOLED, _SEEN),
        arguments=_kontext_guided,
        patch=flux.PATCH,
        more=_at_their_size,
    ),
    "Flux2Pipeline": _FLUX2,
    "Flux2KleinPipeline": _FLUX2,
    "Flux2KleinKVPipeline": dataclasses.replace(_FLUX2, told=_kv_told, arguments=_kv_guided),
    "QwenImagePipeline": Adapter(told=_keywords(_STATES), arguments=_qwen_guided, levels=flow_levels),
    "QwenImageEditPlusPipeline": _QWEN_EDIT,
    "QwenImageEditPipeline": dataclasses.replace(_QWEN_EDIT, arguments=_qwen_first_edit_guided),
    "StableDiffusion3Pipeline": Adapter(told=_keywords(_STATES, _POOLED, row=-1), arguments=guided, levels=flow_levels),
    "StableDiffusionPipeline": _UNET,
    "StableDiffusionXLPipeline": _UNET,
    "StableDiffusionXLImg2ImgPipeline": dataclasses.replace(_UNET, arguments=_refining),
    "ZImagePipeline": Adapter(told=_z_image_told, arguments=guided, levels=flow_levels),
    **CLIPS,
}
