"""What is special about each of diffusers' pipelines, where a run of one is compared with ours.

Legend: N picture tokens, n steps.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..denoisers import qwen_image
from ..encoders.decoder import DecoderEncoder
from ..encoders.t5 import T5Encoder
from ..encoders.vision_language import VisionLanguageEncoder
from .files import open_image
from .frames import BesideLatents
from .image import ImagePipeline
from .pictures import read_lists
from .qwen_image_edit import QwenImageEditing, with_positions

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


def _no_tokens(ours: ImagePipeline, run: Run) -> Tokens:
    return {}


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """What is special about one of diffusers' pipelines.

    `told` finds the prompt's conditioning among the arguments of the denoiser's first call, by the names of our fields;
    `arguments` have both sides do what a user gets who says nothing, and refuse what the pipeline does not take;
    `levels` finds the noise levels of a run, and the times that the denoiser was told, in the scheduler and in the
    denoiser's calls. `ready` makes ours do what diffusers does where the two are known to differ. `pictured` are the
    ids of prompts that are read with pictures. Pictures to look at are `patch` x `patch` cells a token. `made` is what
    diffusers calls the result.
    """

    told: Callable[[Call], Trace]
    arguments: Callable[[ImagePipeline, Run], Mapping[str, Any]]
    levels: Callable[[Any, Sequence[Call]], Trace]
    ready: Callable[[ImagePipeline], ImagePipeline] = _as_it_is
    pictured: Callable[[ImagePipeline, Run], Tokens] = _no_tokens
    patch: int = 1
    made: str = "images"


def adapter_of(pipeline: str) -> Adapter:
    """That of a pipeline of diffusers. ValueError where there is none."""
    if pipeline not in ADAPTERS:
        raise ValueError(f"a {pipeline} cannot be compared; what can is {', '.join(ADAPTERS)}")
    return ADAPTERS[pipeline]


def num_steps(ours: ImagePipeline, run: Run) -> int:
    """Steps of a run."""
    return run.num_inference_steps or ours.recipe.num_inference_steps


def _keywords(*names: tuple[str, str], row: int = 0) -> Callable[[Call], Trace]:
    """Reads keyword arguments, (ours, theirs) each, of which one row is the prompt's."""

    def told(call: Call) -> Trace:
        return {ours: call[1][theirs][row:][:1] for ours, theirs in names}

    return told


def _z_image_told(call: Call) -> Trace:
    """The third argument is a list of texts, the prompts' first."""
    return {"states": call[0][2][0][None]}


def _unet_told(call: Call) -> Trace:
    """The prompts' rows are the last; numbers and pooled vectors are in a dictionary of their own, if there are any."""
    added: Mapping[str, Tensor] = call[1]["added_cond_kwargs"] or {}
    names = {"text_embeds": "pooled", "time_ids": "time_ids"}
    found = {"states": call[1]["encoder_hidden_states"]} | {names[name]: value for name, value in added.items()}
    return {name: value[-1:] for name, value in found.items()}


def _wan_told(call: Call) -> Trace:
    """Texts are padded with zeros; pictures' states are a row each. The latents have theirs beside them."""
    states: Tensor = call[1]["encoder_hidden_states"]
    num_read = int(states[0].any(dim=1).sum())
    told = {"states": states[:1, :num_read], BESIDE: call[1]["hidden_states"][:1]}
    pictures: Tensor | None = call[1].get("encoder_hidden_states_image")
    return told if pictures is None else told | {"picture_states": pictures.flatten(0, 1)[None]}


def _flow_levels(scheduler: Any, calls: Sequence[Call]) -> Trace:
    """All sigmas, with the end."""
    sigmas: Tensor = scheduler.sigmas
    return {SIGMAS: sigmas.float()[None]}


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


def _sized(ours: ImagePipeline, run: Run) -> dict[str, Any]:
    """The size, and the prompt alone."""
    if run.images:
        raise ValueError(f"{run.images[0]}: this pipeline of {ours.source.family} makes pictures of prompts alone")
    return {"width": run.width or ours.recipe.width, "height": run.height or ours.recipe.height}


def _guided(ours: ImagePipeline, run: Run) -> Mapping[str, Any]:
    """The recipe's guidance, and the number of tokens that are read."""
    return {**_sized(ours, run), "guidance_scale": ours.recipe.guidance_scale, **_lengths(ours)}


def _qwen_guided(ours: ImagePipeline, run: Run) -> Mapping[str, Any]:
    """Both need a negative prompt to be guided at all."""
    scale = ours.recipe.guidance_scale
    return {**_sized(ours, run), "true_cfg_scale": scale, "negative_prompt": " ", **_lengths(ours)}


def _flux2_guided(ours: ImagePipeline, run: Run) -> Mapping[str, Any]:
    """Pictures to look at, where there are any."""
    if not run.images:
        return _guided(ours, run)
    return {**_looked_at(run), "guidance_scale": ours.recipe.guidance_scale, **_lengths(ours)}


def _qwen_edit_guided(ours: ImagePipeline, run: Run) -> Mapping[str, Any]:
    """As Qwen-Image, with pictures, which diffusers asks for."""
    if not run.images:
        raise ValueError("there is no picture; this pipeline of diffusers asks for one or more to look at")
    return {**_looked_at(run), "true_cfg_scale": ours.recipe.guidance_scale, "negative_prompt": " "}


def _refining(ours: ImagePipeline, run: Run) -> Mapping[str, Any]:
    """A picture to start from, and at least one step."""
    if len(run.images) != 1 or (run.width, run.height) != (None, None):
        raise ValueError(f"{len(run.images)} pictures; this pipeline starts from one, whose size it keeps")
    strength = min(1.0, max(ours.recipe.strength, 1.5 / num_steps(ours, run)))
    return {"image": _opened(run), "strength": strength, "guidance_scale": ours.recipe.guidance_scale}


def _wan_guided(ours: ImagePipeline, run: Run) -> Mapping[str, Any]:
    """A clip of the prompt alone."""
    return {**_guided(ours, run), "num_frames": run.num_frames or ours.recipe.num_frames}


def _wan_shown(ours: ImagePipeline, run: Run) -> Mapping[str, Any]:
    """A clip that begins with a picture, and may end with another."""
    if not 1 <= len(run.images) <= 2 or not isinstance(ours.looking, BesideLatents):
        raise ValueError(
            f"{len(run.images)} pictures; this pipeline makes clips that begin with one, and may end with another "
            "(beside the latents, else steps cannot be compared)"
        )
    pictures = dict(zip(("image", "last_image"), _opened(run), strict=False))
    return {**_wan_guided(ours, dataclasses.replace(run, images=())), **pictures}


def _looked_at(run: Run) -> dict[str, Any]:
    """Pictures, which give the size where none is asked for."""
    sides = {"width": run.width, "height": run.height}
    return {"image": _opened(run), **{name: side for name, side in sides.items() if side is not None}}


def _opened(run: Run) -> list[Any]:
    return [open_image(path).convert("RGB") for path in run.images]


def _lengths(ours: ImagePipeline) -> Mapping[str, Any]:
    """The tokens that the longest encoder reads."""
    lengths = [each.max_tokens for each in ours.encoders.values() if isinstance(each, T5Encoder | DecoderEncoder)]
    return {"max_sequence_length": max(lengths)} if lengths else {}


def _diffusers_positions(ours: ImagePipeline) -> ImagePipeline:
    """What the language model sees stands where diffusers 0.42 has it."""
    return with_positions(ours, "diffusers")


def _seen(ours: ImagePipeline, run: Run) -> Tokens:
    """The prompt after its pictures."""
    encoder, editing = ours.encoders["llm"], ours.editing
    assert isinstance(encoder, VisionLanguageEncoder)
    assert isinstance(editing, QwenImageEditing)
    (pictures,) = read_lists(_opened(run))
    return {"llm": encoder.tokens([run.prompt], [[editing.small(picture) for picture in pictures]])[0][0]}


_STATES, _POOLED = ("states", "encoder_hidden_states"), ("pooled", "pooled_projections")
_SEEN = (REFERENCES, "hidden_states")
_FLUX2 = Adapter(told=_keywords(_STATES, _SEEN), arguments=_flux2_guided, levels=_flow_levels)
_UNET = Adapter(told=_unet_told, arguments=_guided, levels=_discrete_levels)
ADAPTERS: Mapping[str, Adapter] = {
    "FluxPipeline": Adapter(told=_keywords(_STATES, _POOLED), arguments=_guided, levels=_flow_levels),
    "Flux2Pipeline": _FLUX2,
    "Flux2KleinPipeline": _FLUX2,
    "QwenImagePipeline": Adapter(told=_keywords(_STATES), arguments=_qwen_guided, levels=_flow_levels),
    "QwenImageEditPlusPipeline": Adapter(
        told=_keywords(_STATES, _SEEN),
        arguments=_qwen_edit_guided,
        levels=_flow_levels,
        ready=_diffusers_positions,
        pictured=_seen,
        patch=qwen_image.PATCH,
    ),
    "StableDiffusion3Pipeline": Adapter(
        told=_keywords(_STATES, _POOLED, row=-1), arguments=_guided, levels=_flow_levels
    ),
    "StableDiffusionPipeline": _UNET,
    "StableDiffusionXLPipeline": _UNET,
    "StableDiffusionXLImg2ImgPipeline": dataclasses.replace(_UNET, arguments=_refining),
    "WanPipeline": Adapter(told=_wan_told, arguments=_wan_guided, levels=_flow_levels, made="frames"),
    "WanImageToVideoPipeline": Adapter(told=_wan_told, arguments=_wan_shown, levels=_flow_levels, made="frames"),
    "ZImagePipeline": Adapter(told=_z_image_told, arguments=_guided, levels=_flow_levels),
}
