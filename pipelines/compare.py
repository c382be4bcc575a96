"""One run of a checkpoint through this library and through diffusers, stage by stage: where do they part?

Both sides compute in float32 on the CPU, from the same seed.
"""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from ..denoisers.patches import unpatchify
from ..encoders.decoder import DecoderEncoder
from ..encoders.t5 import T5Encoder
from .arguments import ImageArguments
from .families import family_of_folder
from .folders import INDEX, pipeline_class
from .image import ImagePipeline
from .load import load
from .parts import Layout
from .request import Request

TOLERANCE = 1e-4
IDS = "token ids"

Trace = Mapping[str, Tensor]
"""What came out of each stage, by its name and in order, rows first."""
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What both sides are asked for; sizes and steps that are None are the model's own."""

    prompt: str
    width: int | None = None
    height: int | None = None
    num_inference_steps: int | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage: the largest ||a - b|| / ||b|| of its rows, where b is the reference's (of token ids the share that
    differs), and what else is to say. Shapes that differ are infinitely far apart."""

    name: str
    difference: float
    note: str = ""

    def diverges(self, tolerance: float) -> bool:
        """Whether it is farther than that, or not a number."""
        return not self.difference <= tolerance


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """What is special about one of diffusers' pipelines: `told` finds the prompt's conditioning among the arguments of
    the denoiser's first call, by the names of our fields; `arguments` have both sides do what a user gets who says
    nothing."""

    told: Callable[[Call], Trace]
    arguments: Callable[[ImagePipeline], Mapping[str, Any]]


@runtime_checkable
class Tokenising(Protocol):
    """A text encoder that shows its tokens."""

    def tokens(self, prompts: Sequence[str]) -> tuple[Sequence[Any], tuple[str, ...]]:
        """The ids of each prompt, maybe in chunks, and warnings."""
        ...


def compare_folder(folder: Path, run: Run) -> tuple[Stage, ...]:
    """The stages of a checkpoint in diffusers' layout. One side is in memory at a time.

    Raises:
        ValueError: a family that cannot be compared, or a run that it cannot make. FileNotFoundError: no such folder.
    """
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(f"{folder}: not a folder in diffusers' layout (there is no {INDEX})")
    adapter = adapter_of(pipeline_class(folder))
    ours = load(folder, offload="encoders")
    asked = arguments_of(ours, adapter, run)
    mine = trace_ours(ours, run, asked)
    del ours
    return differences(mine, trace_theirs(load_theirs(folder), family_of_folder(folder).layout, run, asked))


def compare(ours: ImagePipeline, theirs: Any, layout: Layout, run: Run) -> tuple[Stage, ...]:
    """The stages of a pipeline and of diffusers' for the same checkpoint. Errors as for `compare_folder`."""
    asked = arguments_of(ours, adapter_of(type(theirs).__name__), run)
    return differences(trace_ours(ours, run, asked), trace_theirs(theirs, layout, run, asked))


def first_divergence(stages: Sequence[Stage], tolerance: float = TOLERANCE) -> Stage | None:
    """The first stage that is farther apart than `tolerance`, if any is."""
    return next((stage for stage in stages if stage.diverges(tolerance)), None)


def adapter_of(pipeline: str) -> Adapter:
    """That of a pipeline of diffusers. ValueError where there is none."""
    if pipeline not in ADAPTERS:
        raise ValueError(f"a {pipeline} cannot be compared; what can is {', '.join(ADAPTERS)}")
    return ADAPTERS[pipeline]


def load_theirs(folder: Path) -> Any:
    """diffusers' pipeline of a folder, in float32."""
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    build = cast(Any, DiffusionPipeline).from_pretrained
    pipe = build(str(folder), torch_dtype=torch.float32, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def arguments_of(ours: ImagePipeline, adapter: Adapter, run: Run) -> dict[str, Any]:
    """What both sides are given, but for the seed."""
    recipe = ours.recipe
    return {
        "prompt": run.prompt,
        "width": run.width or recipe.width,
        "height": run.height or recipe.height,
        "num_inference_steps": run.num_inference_steps or recipe.num_inference_steps,
        **adapter.arguments(ours),
    }


def trace_ours(ours: ImagePipeline, run: Run, asked: Mapping[str, Any]) -> Trace:
    """Our stages."""
    values = {name: value for name, value in asked.items() if name != "prompt"}
    arguments = cast(ImageArguments, {**values, "seed": run.seed, "output_type": "np"})
    encoded = ours.encode(Request.of(run.prompt, arguments, ours.source.family, ours.family.arguments))
    told, schedule = encoded.conditioning.positive, encoded.plan.schedule
    assert schedule is not None
    trace: dict[str, Tensor] = {}
    for role, encoder in ours.encoders.items():
        if isinstance(encoder, Tokenising):
            trace[f"{IDS}: {role}"] = torch.tensor(encoder.tokens([run.prompt])[0][0]).flatten()[None]
    trace["embeddings: states"] = told.states
    if told.pooled is not None:
        trace["embeddings: pooled"] = told.pooled
    trace["sigmas"] = torch.tensor([schedule.sigmas])
    step = None
    for step in ours.denoise(encoded):
        trace[f"step {step.index}"] = step.latents
    assert step is not None
    return trace | {"pixels": torch.as_tensor(ours.decode(step).images)}


def trace_theirs(pipe: Any, layout: Layout, run: Run, asked: Mapping[str, Any]) -> Trace:
    """diffusers' stages, in its own shapes."""
    steps: dict[str, Tensor] = {}

    def keep(_: object, index: int, time: object, values: dict[str, Any]) -> dict[str, Any]:
        steps[f"step {index}"] = values["latents"].detach().clone()
        return values

    parts: dict[str, nn.Module] = {name: pipe.components[name] for name in (*layout.encoders.values(), layout.denoiser)}
    generator = torch.Generator().manual_seed(run.seed)
    with first_calls(parts) as calls:
        pixels = pipe(**asked, generator=generator, output_type="np", callback_on_step_end=keep).images
    ids = {f"{IDS}: {role}": own_ids(calls[name]) for role, name in layout.encoders.items() if name in calls}
    told = adapter_of(type(pipe).__name__).told(calls[layout.denoiser])
    embeddings = {f"embeddings: {name}": tensor for name, tensor in told.items()}
    sigmas = cast(Tensor, pipe.scheduler.sigmas).float()[None]
    return {**ids, **embeddings, "sigmas": sigmas, **steps, "pixels": torch.as_tensor(pixels)}


@contextmanager
def first_calls(parts: Mapping[str, nn.Module | None]) -> Generator[dict[str, Call]]:
    """Fills the dictionary that it gives with the arguments of the first call of each part, by its name."""
    calls: dict[str, Call] = {}

    def look_at(name: str, part: nn.Module) -> Any:
        def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.setdefault(name, (args, kwargs))

        return part.register_forward_pre_hook(look, with_kwargs=True)

    handles = [look_at(name, part) for name, part in parts.items() if part is not None]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def own_ids(call: Call) -> Tensor:
    """The ids [1, L] of the first row of a text encoder's call, without those that are masked."""
    args, kwargs = call
    ids: Tensor = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
    mask: Tensor | None = kwargs.get("attention_mask")
    return ids[:1] if mask is None else ids[:1, mask[0].bool()]


def differences(ours: Trace, theirs: Trace) -> tuple[Stage, ...]:
    """How far our stages are from theirs."""
    return tuple(difference(name, stage, theirs.get(name)) for name, stage in ours.items())


def difference(name: str, ours: Tensor, theirs: Tensor | None) -> Stage:
    """How far one stage is from theirs, which may be packed as tokens, or have pads after its ids."""
    if theirs is None:
        return Stage(name=name, difference=math.inf, note="diffusers has no such stage")
    if name.startswith(IDS) and len(theirs[0, ours.shape[1] :].unique()) <= 1:
        theirs = theirs[:, : ours.shape[1]]
    if ours.ndim == 5 and theirs.ndim != 5:
        theirs = as_latents(theirs, ours.shape)
    if ours.shape != theirs.shape:
        return Stage(name=name, difference=math.inf, note=f"{list(ours.shape)} here, {list(theirs.shape)} in diffusers")
    if name.startswith(IDS):
        return Stage(name=name, difference=float((ours != theirs).float().mean()))
    a, b = ours.double().flatten(1), theirs.double().flatten(1)
    return Stage(name=name, difference=float(((a - b).norm(dim=1) / b.norm(dim=1)).max()))


def as_latents(theirs: Tensor, shape: Sequence[int]) -> Tensor:
    """Latents [B, C, 1, h, w] of diffusers' [B, C, h, w], or of tokens [B, N, C P P]."""
    if theirs.ndim == 4:
        return theirs[:, :, None]
    patch = math.isqrt(theirs.shape[-1] // shape[1])
    is_whole = theirs.shape[1] * patch**2 == math.prod(shape[2:])
    return unpatchify(theirs, shape, patch) if is_whole else theirs


def _keywords(*names: tuple[str, str], row: int = 0) -> Callable[[Call], Trace]:
    """Reads keyword arguments, (ours, theirs) each, of which one row is the prompt's."""

    def told(call: Call) -> Trace:
        return {ours: call[1][theirs][row:][:1] for ours, theirs in names}

    return told


def _z_image_told(call: Call) -> Trace:
    """The third argument is a list of texts, the prompts' first."""
    return {"states": call[0][2][0][None]}


def _guided(ours: ImagePipeline) -> Mapping[str, Any]:
    """The recipe's guidance, and the number of tokens that are read."""
    return {"guidance_scale": ours.recipe.guidance_scale, **_lengths(ours)}


def _qwen_guided(ours: ImagePipeline) -> Mapping[str, Any]:
    """Both need a negative prompt to be guided at all."""
    return {"true_cfg_scale": ours.recipe.guidance_scale, "negative_prompt": " ", **_lengths(ours)}


def _lengths(ours: ImagePipeline) -> Mapping[str, Any]:
    """The tokens that the longest encoder reads."""
    lengths = [each.max_tokens for each in ours.encoders.values() if isinstance(each, T5Encoder | DecoderEncoder)]
    return {"max_sequence_length": max(lengths)} if lengths else {}


_STATES, _POOLED = ("states", "encoder_hidden_states"), ("pooled", "pooled_projections")
ADAPTERS: Mapping[str, Adapter] = {
    "FluxPipeline": Adapter(told=_keywords(_STATES, _POOLED), arguments=_guided),
    "Flux2Pipeline": Adapter(told=_keywords(_STATES), arguments=_guided),
    "Flux2KleinPipeline": Adapter(told=_keywords(_STATES), arguments=_guided),
    "QwenImagePipeline": Adapter(told=_keywords(_STATES), arguments=_qwen_guided),
    "StableDiffusion3Pipeline": Adapter(told=_keywords(_STATES, _POOLED, row=-1), arguments=_guided),
    "ZImagePipeline": Adapter(told=_z_image_told, arguments=_guided),
}
