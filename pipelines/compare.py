"""One run of a checkpoint through this library and through diffusers, stage by stage: where do they part?

Both sides compute in float32 on the CPU, from the same seed.
"""

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from ..denoisers.patches import patchify, unpatchify
from .arguments import ImageArguments
from .base import Encoded
from .compare_adapters import adapter_of
from .compare_clips import class_for
from .compare_run import BESIDE, REFERENCES, SIGMAS, TIMES, Adapter, Call, Run, Trace, num_steps
from .families import family_of_folder
from .folders import INDEX, pipeline_class
from .frames import FirstLatents, makes_clips
from .image import ImagePipeline
from .load import load
from .parts import Layout
from .request import Request

TOLERANCE = 1e-4
IDS = "token ids"


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


@runtime_checkable
class Tokenising(Protocol):
    """A text encoder that shows its tokens."""

    def tokens(self, prompts: Sequence[str]) -> tuple[Sequence[Any], tuple[str, ...]]:
        """The ids of each prompt, maybe in chunks, and warnings."""
        ...


def compare_folder(folder: Path, run: Run) -> tuple[Stage, ...]:
    """The stages of a checkpoint in diffusers' layout. One side is in memory at a time.

    Raises:
        ValueError: a family that cannot be compared, or a run that it cannot make. FileNotFoundError: no such folder,
        or picture.
    """
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(f"{folder}: not a folder in diffusers' layout (there is no {INDEX})")
    adapter = adapter_of(class_for(pipeline_class(folder), run))
    ours = adapter.ready(load(folder, offload="encoders"))
    asked = arguments_of(ours, adapter, run)
    mine, known = trace_ours(ours, adapter, run, asked), num_known(ours, run)
    del ours
    theirs = made_for(load_theirs(folder), run)
    return differences(mine, trace_theirs(theirs, family_of_folder(folder).layout, run, asked, known))


def compare(ours: ImagePipeline, theirs: Any, layout: Layout, run: Run) -> tuple[Stage, ...]:
    """The stages of a pipeline and of diffusers' for the same checkpoint. Errors as for `compare_folder`."""
    adapter = adapter_of(class_for(type(theirs).__name__, run))
    ours = adapter.ready(ours)
    asked = arguments_of(ours, adapter, run)
    mine, theirs = trace_ours(ours, adapter, run, asked), made_for(theirs, run)
    return differences(mine, trace_theirs(theirs, layout, run, asked, num_known(ours, run)))


def first_divergence(stages: Sequence[Stage], tolerance: float = TOLERANCE) -> Stage | None:
    """The first stage that is farther apart than `tolerance`, if any is."""
    return next((stage for stage in stages if stage.diverges(tolerance)), None)


def load_theirs(folder: Path) -> Any:
    """diffusers' pipeline of a folder, in float32, without what changes pictures once they are made: black ones for
    some, and watermarks."""
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    build = cast(Any, DiffusionPipeline).from_pretrained
    pipe = build(str(folder), torch_dtype=torch.float32, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    for name in {"safety_checker", "watermark"} & set(vars(pipe)):
        setattr(pipe, name, None)
    return pipe


def made_for(theirs: Any, run: Run) -> Any:
    """diffusers' pipeline of the same parts that makes a run."""
    name = class_for(type(theirs).__name__, run)
    if name == type(theirs).__name__:
        return theirs
    import diffusers

    pipe = getattr(diffusers, name).from_pipe(theirs)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def num_known(ours: ImagePipeline, run: Run) -> int:
    """Latent frames that diffusers has from the beginning of a run, and ours goes to, so that steps say nothing of
    them."""
    return int(bool(run.images) and isinstance(ours.looking, FirstLatents))


def arguments_of(ours: ImagePipeline, adapter: Adapter, run: Run) -> dict[str, Any]:
    """What both sides are given, but for the seed. ValueError for frames of a pipeline that makes pictures."""
    if run.num_frames is not None and not makes_clips(ours.family):
        raise ValueError(f"num_frames is {run.num_frames}; this pipeline of {ours.source.family} makes pictures")
    return {"prompt": run.prompt, "num_inference_steps": num_steps(ours, run), **adapter.arguments(ours, run)}


def trace_ours(ours: ImagePipeline, adapter: Adapter, run: Run, asked: Mapping[str, Any]) -> Trace:
    """Our stages."""
    values = {name: value for name, value in asked.items() if name != "prompt"}
    arguments = cast(ImageArguments, {**values, "seed": run.seed, "output_type": "np"})
    encoded = ours.encode(Request.of(run.prompt, arguments, ours.source.family, ours.family.arguments))
    encoders = {role: each for role, each in ours.encoders.items() if isinstance(each, Tokenising)}
    tokens = {role: encoder.tokens([run.prompt])[0][0] for role, encoder in encoders.items()}
    tokens |= adapter.read(ours, run)
    trace = {f"{IDS}: {role}": torch.tensor(ids).flatten()[None] for role, ids in tokens.items()}
    trace |= {**_told(encoded, adapter), **_levels(encoded)}
    step, known = None, num_known(ours, run)
    for step in ours.denoise(encoded):
        if step.latents.shape[2] > known:
            trace[f"step {step.index}"] = step.latents[:, :, known:] * ours.ends.unit(step.sigma)
    assert step is not None
    made = ours.decode(step)
    return trace | {"pixels": torch.as_tensor(made.images if made.videos is None else made.videos)}


def _told(encoded: Encoded, adapter: Adapter) -> Trace:
    """What our denoiser is told of the prompt."""
    told = encoded.conditioning.positive
    values = {"states": told.states[:, : int(told.lengths.max())], "pooled": told.pooled, "time_ids": told.time_ids}
    if told.other_states is not None and told.other_lengths is not None and bool(told.other_lengths.any()):
        values["other_states"] = told.other_states[:, : int(told.other_lengths.max())]
    values |= {"picture_states": encoded.picture_states, BESIDE: encoded.beside}
    if told.references:
        values[REFERENCES] = torch.cat([patchify(each, adapter.patch) for each in told.references], dim=1)
    return {_titled(name): each for name, each in values.items() if each is not None and name not in adapter.untold}


def _titled(name: str) -> str:
    """The stage of what the denoiser is told."""
    return name if name in (REFERENCES, BESIDE) else f"embeddings: {name}"


def _levels(encoded: Encoded) -> Trace:
    """Our noise levels: with the end on the flow path; without it, and with the times, on the exploding one."""
    schedule = encoded.plan.schedule
    assert schedule is not None
    if schedule.path == "flow":
        return {SIGMAS: torch.tensor([schedule.sigmas])}
    points = schedule.points[:-1]
    return {
        TIMES: torch.tensor([[point.time for point in points]]),
        SIGMAS: torch.tensor([[point.sigma for point in points]]),
    }


def trace_theirs(pipe: Any, layout: Layout, run: Run, asked: Mapping[str, Any], known: int = 0) -> Trace:
    """diffusers' stages, in its own shapes; steps are without the latent frames that are `known`."""
    latents: list[Tensor] = []
    parts: dict[str, nn.Module] = {name: pipe.components[name] for name in (*layout.encoders.values(), layout.denoiser)}
    generator, adapter = torch.Generator().manual_seed(run.seed), adapter_of(type(pipe).__name__)
    with recorded(parts) as calls, _complete(pipe), adapter.watched(pipe, latents) as more:
        made = pipe(**asked, **more, **adapter.more(asked), generator=generator, output_type="np")
    denoising = calls[layout.denoiser]
    ids = {f"{IDS}: {role}": own_ids(calls[name][0]) for role, name in layout.encoders.items() if calls[name]}
    told = {_titled(name): tensor for name, tensor in adapter.told(denoising[0]).items()}
    levels = adapter.levels(pipe.scheduler, denoising)
    if TIMES in levels:  # PNDM's first step takes two calls, and shows what is between them
        del latents[: len(latents) - levels[TIMES].shape[1]]
    steps = {f"step {index}": _unknown(each, known, denoising[0]) for index, each in enumerate(latents)}
    return {**ids, **told, **levels, **steps, "pixels": torch.as_tensor(made[adapter.made])}


def _unknown(latents: Tensor, known: int, call: Call) -> Tensor:
    """Latents [B, C, F, h, w], or tokens [B, N, C] whose denoiser's call tells frames apart, without `known` frames."""
    if not known:
        return latents
    is_whole = latents.ndim == 5
    return latents[:, :, known:] if is_whole else latents[:, known * call[1]["height"] * call[1]["width"] :]


@contextmanager
def _complete(pipe: Any) -> Generator[None]:
    """Says so where a pipeline of diffusers uses a package that is not here."""
    try:
        yield
    except NameError as error:
        raise ValueError(f"diffusers' {type(pipe).__name__} does not run without this package: {error}") from None


@contextmanager
def recorded(parts: Mapping[str, nn.Module | None]) -> Generator[Mapping[str, list[Call]]]:
    """Fills the lists that it gives with the arguments of the calls of each part, by its name."""
    calls: dict[str, list[Call]] = {name: [] for name in parts}

    def look_at(name: str, part: nn.Module) -> Any:
        def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[name].append((args, kwargs))

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
    if name == BESIDE:
        theirs = theirs[:, -ours.shape[1] :, : ours.shape[2]]
    if name == REFERENCES:
        theirs = theirs[:, -ours.shape[1] :]  # they come after those of the picture that is made
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
