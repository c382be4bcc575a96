"""The pipeline of pictures and clips: from text and from pictures, inpainting and editing.

Legend: N pictures or clips, C latent channels, F latent frames, H W pixels, h w latent cells.
"""

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from ..core.attention.base import AttentionSelector
from ..core.copies import moved
from ..denoisers.base import Conditioning, Denoiser, Prompt
from ..encoders.base import TextEncoder, resident_encoders
from ..schedulers import RowNoise
from ..schedulers.base import State, Step
from ..vae.base import Autoencoder
from ..vae.preview import LatentPreview
from .arguments import ImageArguments
from .base import Encoded, ImageStep, OnStep, Source
from .causal_walk import CausalWalk
from .checks import check_cancel, check_encoders, check_kind, check_latents, check_on_step
from .chunked import chunks_of
from .edit import Editing, References, read_references, with_references
from .ends import Ends, FlowEnds
from .expansion import expanded
from .family import Family, NegativeFamily, PlainFamily
from .finite import NonFiniteError, is_finite
from .frame_stream import check_streams, streamed_frames
from .frames import (
    Fitted,
    Looking,
    Seen,
    frames_in_group,
    makes_clips,
    read_shown,
    whole_groups,
    with_frames,
    with_pictures,
    with_size,
)
from .handed import read_handed, sized
from .inpaint import MaskReader
from .origin import Origin
from .placement import device_named, dtype_named
from .plan import Inputs, Plan, generator_states, make_plan, read_inputs
from .progress import Progress
from .recipe import Recipe
from .request import Request
from .result import Result, to_images, to_videos
from .run_manifest import manifest_of_run, prompt_tensors
from .texts import OtherTexts
from .timed_decoding import ready_to_decode
from .walk import Walk

if TYPE_CHECKING:
    from PIL.Image import Image

    from .result import Videos

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ImagePipeline:
    """Components and the stages over them; it keeps nothing between calls, so threads may share it.

    Change one with `dataclasses.replace`. `encoders` by role; `family` makes choices of the arguments; `dtype` is that
    of the weights: latents, sigma and time stay float32. With `editing`, `image` are pictures that the model looks at;
    with `masking`, it was made for inpainting; with `looking`, its clips begin with pictures. `origin` is what it was
    loaded from, but for plate.
    """

    source: Source
    recipe: Recipe
    denoiser: Denoiser[Any]
    encoders: Mapping[str, TextEncoder]
    vae: Autoencoder
    attention: AttentionSelector
    family: Family = PlainFamily()  # noqa: RUF009 (immutable)
    ends: Ends = FlowEnds()  # noqa: RUF009 (immutable)
    editing: Editing | None = None
    masking: MaskReader | None = None
    looking: Looking | None = None
    preview_projection: LatentPreview | None = None
    origin: Origin | None = None
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32

    def __repr__(self) -> str:
        placed = f"device={str(self.device)!r}, dtype={str(self.dtype).removeprefix('torch.')!r}"
        return f"ImagePipeline(family={self.source.family!r}, name={self.source.name!r}, {placed})"

    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        on_step: OnStep | None = None,
        cancel: Event | None = None,
        progress: bool = True,
        **arguments: Unpack[ImageArguments],
    ) -> Result:
        """Pictures for a request (`Request` says what the arguments are): `decode` of the last step of `stream`.

        `on_step` is called with every step; what it returns is ignored. A bar on stderr after two seconds, unless
        `progress` is false.

        Raises:
            ValueError, FileNotFoundError: an argument is wrong; nothing was computed. NonFiniteError: a value became
            NaN or infinite. Cancelled: `cancel` was set; it holds the last step, and nothing was decoded.
        """
        check_cancel(cancel)
        check_on_step(on_step)
        encoded = self.encode(Request.of(prompt, arguments, self.source.family, self.family.arguments))
        step: ImageStep | None = None
        with Progress(enabled=progress) as bar:
            for step in self.denoise(encoded, cancel=cancel):
                bar.update(step.index + 1, step.total)
                if on_step is not None:
                    on_step(step)
        assert step is not None
        return self.decode(step)

    def stream(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        cancel: Event | None = None,
        **arguments: Unpack[ImageArguments],
    ) -> Iterator[ImageStep]:
        """The steps of a request; `decode` any of them. Arguments are checked, and prompts encoded, by the call
        itself."""
        check_cancel(cancel)
        return self.denoise(
            self.encode(Request.of(prompt, arguments, self.source.family, self.family.arguments)), cancel=cancel
        )

    def stream_frames(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        cancel: Event | None = None,
        **arguments: Unpack[ImageArguments],
    ) -> "Iterator[Videos]":
        """The frames of `Result.videos`, in its form, group by group as they are ready: a chunk's, of clips that are
        made by chunks, before the next one is begun. Arguments are checked, and prompts encoded, by the call itself.

        Raises:
            ValueError: as `__call__`, or the model makes pictures. NonFiniteError, Cancelled: by the iterator.
        """
        check_cancel(cancel)
        request = Request.of(prompt, arguments, self.source.family, self.family.arguments)
        check_streams(self.family, request)
        encoded = self.encode(request)
        return streamed_frames(self.denoise(encoded, cancel=cancel), encoded, self.vae, self.ends, cancel)

    @torch.no_grad()
    def encode(self, request: Request) -> Encoded:
        """Everything before the first step: choices, conditioning, the latents of input pictures.

        Raises:
            ValueError, FileNotFoundError: before anything is computed. NonFiniteError: an encoder's output is not
            finite.
        """
        check_kind("request", request, Request, "a Request")
        start = time.perf_counter()
        self._check(request)
        request = with_pictures(request)
        references, cells = read_references(request, self.editing), self.vae.downsampling
        handed, shown = read_handed(request, self.vae.latent_channels), read_shown(request, self.looking)
        request = with_size(with_frames(request), shown, self.looking)
        inputs = read_inputs(request, references, looks=self.looking is not None) if handed is None else None
        request = request if handed is None else sized(request, handed, cells)
        plan, group = self._plan(request, inputs, references), frames_in_group(self.vae)
        fitted, sides = None if shown is None else shown.fitted(plan, group), (plan.height, plan.width)
        shape = (plan.num_images, self.vae.latent_channels, plan.latent_frames, *(side // cells for side in sides))
        initial = self._initial(request, shape)
        request, plan = expanded(request, plan)
        conditioning = self._conditioning(request, plan, references)
        draws = self.family.draws_posterior and plan.schedule is not None  # strength 0 is the round trip
        noise = RowNoise.resumed(generator_states(request, plan.seeds), shape)
        source = self._source(inputs, plan, noise if draws else None)
        seen = self._seen(fitted, noise)
        beside = self._beside(inputs, plan, RowNoise.resumed(noise.state(), shape), initial)
        remarks = conditioning.positive.warnings + (conditioning.negative.warnings if conditioning.negative else ())
        return Encoded(
            plan=plan,
            shape=shape,
            conditioning=conditioning,
            noise=noise.state(),
            initial=initial,
            source=source,
            pixels=None if inputs is None else inputs.pixels[list(inputs.rows)],
            mask=None if inputs is None or inputs.mask is None else inputs.mask[list(inputs.mask_rows)],
            handed=None if handed is None else handed.to(self.device),
            beside=beside if seen.beside is None else seen.beside,
            picture_states=None if seen.states is None else seen.states.to(self.dtype),
            num_skipped_draws=int(draws and inputs is not None and inputs.mask is not None),
            warnings=tuple(dict.fromkeys((*plan.warnings, *remarks, *(() if fitted is None else fitted.warnings)))),
            manifest=manifest_of_run(self, request, plan),
            seconds={"encode": time.perf_counter() - start},
        )

    def denoise(
        self, encoded: Encoded, *, resume: State | None = None, cancel: Event | None = None
    ) -> Iterator[ImageStep]:
        """The steps of a run, or those that are left after `resume`, the state of a step of the same run, maybe in
        another process.

        There is always at least one: where nothing is left to do (strength 0, or a state after the last step), it holds
        the result.

        Raises:
            ValueError: `resume` belongs to another run, or an argument is of the wrong type. NonFiniteError, Cancelled:
            see `__call__`; raised by the iterator.
        """
        check_kind("encoded", encoded, Encoded, "what pipe.encode returned")
        check_cancel(cancel)
        kind = Walk if chunks_of(self.denoiser) is None else CausalWalk
        return kind(
            denoiser=self.denoiser,
            attention=self.attention,
            ends=self.ends,
            downsampling=self.vae.downsampling,
            encoded=encoded,
        ).steps(resume, cancel)

    @torch.no_grad()
    def decode(self, latents: Step | Tensor, encoded: Encoded | None = None) -> Result:
        """The pictures or clips of a step, or of a result's latents [N, C, F, h, w] alone (their run is `encoded`,
        where it is given).

        Without a run there are no seeds and no manifest, masks are not applied, clips have all frames that the latents
        stand for, and pictures are PIL.

        Raises:
            ValueError: not latents, or latents of another shape than their run's. NonFiniteError: the decoder's output
            is not finite.
        """
        check_kind("latents", latents, (Step, Tensor), "a step, or a tensor of latents")
        check_kind("encoded", encoded, (Encoded, type(None)), "what pipe.encode returned")
        start = time.perf_counter()
        run = latents.encoded if isinstance(latents, ImageStep) else encoded
        seconds = dict(latents.seconds) if isinstance(latents, ImageStep) else dict(run.seconds) if run else {}
        x = latents.latents * self.ends.unit(latents.sigma) if isinstance(latents, Step) else latents
        clips = makes_clips(self.family)
        is_part = isinstance(latents, Step) and latents.chunk is not None  # of a clip, which holds the frames so far
        check_latents(x, self.vae.latent_channels, None if run is None or is_part else run.shape, clips=clips)
        output_type = "pil" if run is None else run.plan.output_type
        state = latents.state if isinstance(latents, Step) else None
        pixels = None if output_type == "latent" else self._pixels(x, run, state)
        images = None if pixels is None or pixels.shape[2] > 1 else to_images(pixels, output_type)
        videos = None if pixels is None or not clips else to_videos(pixels, output_type)
        seconds["decode"] = time.perf_counter() - start
        return Result(
            images=images,
            videos=videos,
            fps=(self.recipe.fps if run is None else run.plan.frame_rate or self.recipe.fps) if clips else None,
            latents=x.float(),
            seeds=() if run is None else run.plan.seeds,
            timings=seconds,
            warnings=() if run is None else run.warnings,
            manifest=None if run is None else run.manifest,
        )

    def preview(self, step: Step) -> "list[Image]":
        """Small pictures, a pixel per latent cell, of what the step expects the result to be; no decoder is run.

        Raises:
            ValueError: not a step, or the model has no preview projection.
        """
        check_kind("step", step, Step, "a step")
        if self.preview_projection is None:
            raise ValueError(f"{self.source.name} has no preview projection; decode the step instead")
        images = to_images(self.preview_projection(step.denoised), "pil")
        assert isinstance(images, list)
        return images

    def to(self, device: str | torch.device | None = None, dtype: str | torch.dtype | None = None) -> "ImagePipeline":
        """A new pipeline with its weights on `device` in `dtype` (None: as now); this one stays as it is."""
        place = self.device if device is None else device_named(device)
        kind = None if dtype is None else dtype_named(dtype)
        return dataclasses.replace(
            self,
            denoiser=moved(self.denoiser, place, kind),
            encoders={role: moved(encoder, place, kind) for role, encoder in self.encoders.items()},
            vae=moved(self.vae, place, kind),
            looking=moved(self.looking, place, kind),
            device=place,
            dtype=self.dtype if kind is None else kind,
        )

    def save(self, folder: str | Path) -> None:
        """Writes every file that `calotype.load(folder)` reads, weights in this pipeline's dtype: plate's own, or a new
        folder in diffusers' layout, which appears whole or not at all. The folder is made if need be.

        Weights that are not in memory are read from where they were loaded from, one after the other.

        Raises:
            ValueError: components that no layout is known for, something that a folder has no place for, or the folder
            cannot be written to, or (but for plate) is not empty. FileNotFoundError: the weights are gone.
        """
        from .plate import save_plate
        from .saving import save_folder

        target = Path(check_kind("folder", folder, (str, Path), "the name of a folder"))
        if self.origin is None:
            save_plate(self, target)
        else:
            save_folder(self, self.origin, target)

    def _check(self, request: Request) -> None:
        """Refuses what this pipeline cannot be asked for."""
        request.check_used(self.source.family, self.family.arguments)
        self.family.check(request)
        if self.masking is not None:
            self.masking.check(request)

    def _plan(self, request: Request, inputs: Inputs | None, references: References | None) -> Plan:
        return make_plan(
            request,
            self.recipe,
            inputs,
            references,
            family=self.family,
            ends=self.ends,
            downsampling=self.vae.downsampling,
            group=frames_in_group(self.vae),
            chunks=chunks_of(self.denoiser),
        )

    def _initial(self, request: Request, shape: tuple[int, ...]) -> Tensor | None:
        if request.latents is None:
            return None
        given = request.latents if request.latents.ndim == 5 else request.latents[:, :, None]
        if tuple(given.shape) != shape:
            raise ValueError(f"latents have shape {tuple(request.latents.shape)}; this request needs {shape}")
        return given.detach().to(self.device, torch.float32, copy=True)

    def _conditioning(self, request: Request, plan: Plan, references: References | None) -> Prompt:
        given, request = request.given_conditioning, dataclasses.replace(request, height=plan.height, width=plan.width)
        positive = None if given is None else given.positive.to(self.device, self.dtype)
        negative = None if given is None or given.negative is None else given.negative.to(self.device, self.dtype)
        needed = plan.guidance.needs_negative
        if self.origin is not None and (positive is None or (needed and negative is None)):
            check_encoders(self.encoders, self.origin.layout.needed_encoders)
        pipe = self if positive is not None or negative is not None or not needed else self._with_resident_encoders()
        if positive is None:
            positive = pipe._encode_text(request.prompts, request.other_prompts, request, references)
        if not needed:
            negative = None
        elif negative is None:
            negative = pipe._negative(positive, request, references)
        del pipe  # its weights make room
        prompt = with_references(Prompt(positive=positive, negative=negative), self._reference_latents(references))
        if not all(is_finite(tensor) for tensor in prompt_tensors(prompt)):
            raise NonFiniteError("encode")
        return prompt

    def _with_resident_encoders(self) -> "ImagePipeline":
        """The pipeline for one encoding of several texts: weights that stay in their files are read once for all."""
        return dataclasses.replace(self, encoders=resident_encoders(self.encoders))

    def _negative(self, positive: Conditioning, request: Request, references: References | None) -> Conditioning:
        unskipped = dataclasses.replace(request, clip_skip=None)

        def encode() -> Conditioning:
            return self._encode_text(request.negative_prompts, request.other_negatives, unskipped, references)

        return self.family.negative(positive, encode, request) if isinstance(self.family, NegativeFamily) else encode()

    def _encode_text(
        self, prompts: tuple[str, ...], others: OtherTexts, request: Request, references: References | None
    ) -> Conditioning:
        """One row per prompt; texts that come twice together, with the same pictures, are encoded once."""
        lists = (0,) * len(prompts) if references is None else references.rows
        told = tuple(zip(prompts, others.second, others.third, lists, strict=True))
        distinct = tuple(dict.fromkeys(told))
        first, second, third, lists = zip(*distinct, strict=True)
        texts = OtherTexts(second=second, third=third)
        if references is None:
            conditioning = self.family.condition(self.encoders, first, texts, request)
        else:
            conditioning = references.condition(self.encoders, first, texts, lists, request)
        return conditioning if distinct == told else conditioning.rows([distinct.index(each) for each in told])

    def _reference_latents(self, references: References | None) -> list[Tensor]:
        """One batch of a row per prompt for each picture that is looked at."""
        if references is None:
            return []
        return [self.vae.encode(each.to(self.device)).float()[list(references.rows)] for each in references.pixels]

    def _source(self, inputs: Inputs | None, plan: Plan, noise: RowNoise | None) -> Tensor | None:
        """The latents that a run begins from, if it does."""
        if inputs is None or (self.masking is not None and self.masking.begins_with_noise(plan)):
            return None
        return self._latents(inputs, noise)

    def _seen(self, fitted: Fitted | None, noise: RowNoise) -> Seen:
        """What the denoiser is told of pictures that clips begin with; `noise` stands before the initial noise."""
        if fitted is None or self.looking is None:
            return Seen()
        return self.looking.see(fitted, self.vae, self.device, noise)

    def _beside(self, inputs: Inputs | None, plan: Plan, noise: RowNoise, initial: Tensor | None) -> Tensor | None:
        """What the model reads beside its latents; `noise` stands before the initial noise."""
        if self.masking is None or inputs is None or inputs.mask is None or plan.schedule is None:
            return None
        if initial is None:
            noise.draw()
        covered = self._latents(self.masking.covered(inputs), noise)
        return self.masking.beside(inputs.mask[list(inputs.mask_rows)], covered)

    def _latents(self, inputs: Inputs, noise: RowNoise | None) -> Tensor:
        """One row per picture: the posterior's mean, or, with `noise`, a sample of it."""
        pixels, rows = whole_groups(inputs.pixels.to(self.device), self.vae), list(inputs.rows)
        if noise is None:
            latents = self.vae.encode(pixels).float()[rows]
        else:
            latents = self.vae.encode(pixels[rows], noise.draw().to(self.device)).float()
        if not is_finite(latents):
            raise NonFiniteError("encode")
        return latents

    def _pixels(self, latents: Tensor, run: Encoded | None, state: State | None) -> Tensor:
        vae, latents = ready_to_decode(self.vae, latents.to(self.device), run, state)
        pixels = vae.decode(latents).float()
        if not is_finite(pixels):
            raise NonFiniteError("decode")
        if run is None or run.mask is None or run.pixels is None:
            return pixels if run is None else pixels[:, :, : run.plan.num_frames]
        return torch.where(run.mask.to(pixels.device), pixels, run.pixels.to(pixels.device))
