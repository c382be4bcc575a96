"""The first stage of a run: all that is chosen and computed before its first step.

Legend: N pictures or clips, C latent channels, F latent frames, H W pixels, h w latent cells.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..schedulers import RowNoise
from .base import Encoded
from .chunked import chunks_of
from .conditioning import prompt_of_run
from .conditions import with_conditions
from .edit import References, read_references
from .expansion import expanded
from .finite import NonFiniteError, is_finite
from .frames import (
    Fitted,
    Seen,
    Shown,
    frames_in_group,
    read_shown,
    whole_groups,
    with_frames,
    with_pictures,
    with_size,
)
from .handed import read_handed, sized
from .held import Held
from .placing import Excerpts, Placed, read_placing
from .plan import Inputs, Plan, generator_states, make_plan, read_inputs
from .request import Request
from .run_manifest import manifest_of_run

if TYPE_CHECKING:
    from .image import ImagePipeline


def encode_request(pipe: "ImagePipeline", request: Request) -> Encoded:
    """See `ImagePipeline.encode`. Arguments are checked before anything is computed."""
    start = time.perf_counter()
    _check(pipe, request)
    given = _read(pipe, request)
    plan = _plan(pipe, given)
    group = frames_in_group(pipe.vae)
    fitted = None if given.shown is None else given.shown.fitted(plan, group)
    placed = None if given.excerpts is None else given.excerpts.fitted(plan, group)
    cells, inputs = pipe.vae.downsampling, given.inputs
    shape = (plan.num_images, pipe.vae.latent_channels, plan.latent_frames, plan.height // cells, plan.width // cells)
    initial = _initial(given.request, shape, pipe.device)

    request, plan = expanded(given.request, plan)
    conditioning = prompt_of_run(pipe, request, plan, given.references)
    draws = pipe.family.draws_posterior and plan.schedule is not None  # strength 0 is the round trip
    noise = RowNoise.resumed(generator_states(request, plan.seeds), shape)
    source = _source(pipe, inputs, plan, noise if draws else None)
    seen = _seen(pipe, fitted, noise)
    beside = _beside(pipe, inputs, plan, RowNoise.resumed(noise.state(), shape), initial)
    held = None if placed is None else _held(pipe, placed, plan, shape, noise, initial)
    resized = [line for each in (fitted, placed) if each is not None for line in each.warnings]
    remarks = conditioning.positive.warnings + (conditioning.negative.warnings if conditioning.negative else ())
    return Encoded(
        plan=plan,
        shape=shape,
        conditioning=conditioning,
        noise=noise.state(),
        initial=initial,
        source=source,
        pixels=None if inputs is None else inputs.each_pixels,
        mask=None if inputs is None else inputs.each_mask,
        handed=None if given.handed is None else given.handed.to(pipe.device),
        beside=beside if seen.beside is None else seen.beside,
        picture_states=None if seen.states is None else seen.states.to(pipe.dtype),
        held=held,
        num_skipped_draws=int(draws and inputs is not None and inputs.mask is not None),
        warnings=tuple(dict.fromkeys((*plan.warnings, *remarks, *resized))),
        manifest=manifest_of_run(pipe, request, plan),
        seconds={"encode": time.perf_counter() - start},
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Given:
    """What a request brings besides its texts, read: pictures that are looked at (`references`) or that clips begin
    with (`shown`), pictures and clips that clips show at frames (`excerpts`), latents [N, C, 1, h, w] of another run
    (`handed`), and what a run starts from (`inputs`). In `request` pictures are in place of their files, and sizes are
    as these ask for."""

    request: Request
    references: References | None
    handed: Tensor | None
    shown: Shown | None
    excerpts: Excerpts | None
    inputs: Inputs | None


def _check(pipe: "ImagePipeline", request: Request) -> None:
    """Refuses what this pipeline cannot be asked for."""
    request.check_used(pipe.source.family, pipe.family.arguments)
    pipe.family.check(request)
    if pipe.masking is not None:
        pipe.masking.check(request)


def _read(pipe: "ImagePipeline", request: Request) -> _Given:
    """What a request brings. ValueError, FileNotFoundError: something else than what its arguments take."""
    request = with_conditions(with_pictures(request))
    references = read_references(request, pipe.editing)
    handed, shown = read_handed(request, pipe.vae.latent_channels), read_shown(request, pipe.looking)
    request = with_size(with_frames(request), shown, pipe.looking)
    excerpts = read_placing(pipe.family, request)
    looks = pipe.looking is not None or excerpts is not None
    inputs = read_inputs(request, references, looks=looks) if handed is None else None
    request = request if handed is None else sized(request, handed, pipe.vae.downsampling)
    return _Given(request=request, references=references, handed=handed, shown=shown, excerpts=excerpts, inputs=inputs)


def _plan(pipe: "ImagePipeline", given: _Given) -> Plan:
    return make_plan(
        given.request,
        pipe.recipe,
        given.inputs,
        given.references,
        family=pipe.family,
        ends=pipe.ends,
        downsampling=pipe.vae.downsampling,
        group=frames_in_group(pipe.vae),
        chunks=chunks_of(pipe.denoiser),
    )


def _initial(request: Request, shape: tuple[int, ...], device: torch.device) -> Tensor | None:
    """The initial noise, where it is given. ValueError for another shape than the run's."""
    if request.latents is None:
        return None
    given = request.latents if request.latents.ndim == 5 else request.latents[:, :, None]
    if tuple(given.shape) != shape:
        raise ValueError(f"latents have shape {tuple(request.latents.shape)}; this request needs {shape}")
    return given.detach().to(device, torch.float32, copy=True)


def _source(pipe: "ImagePipeline", inputs: Inputs | None, plan: Plan, noise: RowNoise | None) -> Tensor | None:
    """The latents that a run begins from, if it does."""
    if inputs is None or (pipe.masking is not None and pipe.masking.begins_with_noise(plan)):
        return None
    return _latents(pipe, inputs.after(plan.num_unseen), noise)


def _seen(pipe: "ImagePipeline", fitted: Fitted | None, noise: RowNoise) -> Seen:
    """What the denoiser is told of pictures that clips begin with; `noise` stands before the initial noise."""
    if fitted is None or pipe.looking is None:
        return Seen()
    return pipe.looking.see(fitted, pipe.vae, pipe.device, noise)


def _held(
    pipe: "ImagePipeline", placed: Placed, plan: Plan, shape: tuple[int, ...], noise: RowNoise, initial: Tensor | None
) -> Held | None:
    """The frames that a run is given, where it takes any steps; `noise` stands before the initial noise."""
    if plan.schedule is None:
        return None
    drawing = RowNoise.resumed(noise.state(), shape)
    return placed.held(pipe.vae, pipe.device, drawing, shape, drawn=initial is None)


def _beside(
    pipe: "ImagePipeline", inputs: Inputs | None, plan: Plan, noise: RowNoise, initial: Tensor | None
) -> Tensor | None:
    """What a model for inpainting reads beside its latents; `noise` stands before the initial noise."""
    mask = None if inputs is None else inputs.each_mask
    if pipe.masking is None or inputs is None or mask is None or plan.schedule is None:
        return None
    if initial is None:
        noise.draw()
    return pipe.masking.beside(mask, _latents(pipe, pipe.masking.covered(inputs), noise))


def _latents(pipe: "ImagePipeline", inputs: Inputs, noise: RowNoise | None) -> Tensor:
    """One row per picture: the posterior's mean, or, with `noise`, a sample of it."""
    pixels, rows = whole_groups(inputs.pixels.to(pipe.device), pipe.vae), list(inputs.rows)
    if noise is None:
        latents = pipe.vae.encode(pixels).float()[rows]
    else:
        latents = pipe.vae.encode(pixels[rows], noise.draw().to(pipe.device)).float()
    if not is_finite(latents):
        raise NonFiniteError("encode")
    return latents
