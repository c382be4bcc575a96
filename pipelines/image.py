"""The picture pipeline: text-to-image, image-to-image, inpainting and editing.

Legend: N pictures, C latent channels, H W pixels, h w latent cells.
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
from ..encoders.base import TextEncoder
from ..schedulers import RowNoise
from ..schedulers.base import State, Step
from ..vae.base import Autoencoder
from ..vae.preview import LatentPreview
from .arguments import ImageArguments
from .base import Encoded, ImageStep, OnStep, Source
from .checks import check_cancel, check_kind, check_latents, check_on_step
from .edit import Editing, References, begins_with_image, read_references, with_references
from .ends import Ends, FlowEnds
from .expansion import expanded
from .family import Family, NegativeFamily, PlainFamily
from .finite import NonFiniteError, is_finite
from .handed import read_handed, sized
from .manifest import Manifest, Task, digest_input
from .placement import device_named, dtype_named
from .plan import Inputs, Plan, generator_states, make_plan, read_inputs, used_generators
from .progress import Progress
from .recipe import Recipe
from .request import Request
from .result import Result, to_images
from .walk import Walk

if TYPE_CHECKING:
    from PIL.Image import Image

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, eq=False)
class ImagePipeline:
    """Components and the stages over them; it keeps nothing between calls, so threads may share it.

    Change one with `dataclasses.replace`. `encoders` by role; `family` makes choices of the arguments; `dtype` is that
    of the weights: latents, sigma and time stay float32. With `editing`, `image` are pictures that the model looks at.
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
    preview_projection: LatentPreview | None = None
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32

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

    @torch.no_grad()
    def encode(self, request: Request) -> Encoded:
        """Everything before the first step: choices, conditioning, the latents of input pictures.

        Raises:
            ValueError, FileNotFoundError: before anything is computed. NonFiniteError: an encoder's output is not
            finite.
        """
        check_kind("request", request, Request, "a Request")
        start = time.perf_counter()
        request.check_used(self.source.family, self.family.arguments)
        self.family.check(request)
        references, cells = read_references(request, self.editing), self.vae.downsampling
        handed = read_handed(request, self.vae.latent_channels)
        inputs = read_inputs(request, references) if handed is None else None
        request = request if handed is None else sized(request, handed, cells)
        plan = make_plan(
            request, self.recipe, inputs, references, family=self.family, ends=self.ends, downsampling=cells
        )
        shape = (plan.num_images, self.vae.latent_channels, 1, plan.height // cells, plan.width // cells)
        initial = self._initial(request, shape)
        request, plan = expanded(request, plan)
        conditioning = self._conditioning(request, plan, references)
        draws = self.family.draws_posterior and plan.schedule is not None  # strength 0 is the round trip
        noise = RowNoise.resumed(generator_states(request, plan.seeds), shape)
        source = None if inputs is None else self._latents(inputs, noise if draws else None)
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
            num_skipped_draws=int(draws and inputs is not None and inputs.mask is not None),
            warnings=tuple(dict.fromkeys((*plan.warnings, *remarks))),
            manifest=self._manifest(request, plan),
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
        walk = Walk(
            denoiser=self.denoiser,
            attention=self.attention,
            ends=self.ends,
            downsampling=self.vae.downsampling,
            encoded=encoded,
        )
        return walk.steps(resume, cancel)

    @torch.no_grad()
    def decode(self, latents: Step | Tensor, encoded: Encoded | None = None) -> Result:
        """The pictures of a step, or of a result's latents [N, C, 1, h, w] alone (their run is `encoded`, where it is
        given).

        Without a run there are no seeds and no manifest, masks are not applied, and pictures are PIL.

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
        check_latents(x, self.vae.latent_channels, None if run is None else run.shape)
        output_type = "pil" if run is None else run.plan.output_type
        images = None if output_type == "latent" else to_images(self._pixels(x, run), output_type)
        seconds["decode"] = time.perf_counter() - start
        return Result(
            images=images,
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
            device=place,
            dtype=self.dtype if kind is None else kind,
        )

    def save(self, folder: str | Path) -> None:
        """Writes every file that `calotype.load(folder)` reads, weights in this pipeline's dtype. The folder is made if
        need be.

        Raises:
            ValueError: components that no layout is known for, or the folder cannot be written to.
        """
        from .plate import save_plate

        save_plate(self, Path(folder))

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
        if positive is None:
            positive = self._encode_text(request.prompts, request.second_prompts, request, references)
        if not plan.guidance.needs_negative:
            negative = None
        elif negative is None:
            negative = self._negative(positive, request, references)
        prompt = with_references(Prompt(positive=positive, negative=negative), self._reference_latents(references))
        if not all(is_finite(tensor) for tensor in _tensors(prompt)):
            raise NonFiniteError("encode")
        return prompt

    def _negative(self, positive: Conditioning, request: Request, references: References | None) -> Conditioning:
        unskipped = dataclasses.replace(request, clip_skip=None)

        def encode() -> Conditioning:
            return self._encode_text(request.negative_prompts, request.negative_prompts, unskipped, references)

        return self.family.negative(positive, encode, request) if isinstance(self.family, NegativeFamily) else encode()

    def _encode_text(
        self, prompts: tuple[str, ...], second: tuple[str, ...], request: Request, references: References | None
    ) -> Conditioning:
        """One row per prompt; a pair of texts, with the same pictures, that comes twice is encoded once."""
        lists = (0,) * len(prompts) if references is None else references.rows
        told = tuple(zip(prompts, second, lists, strict=True))
        distinct = tuple(dict.fromkeys(told))
        first, other, lists = zip(*distinct, strict=True)
        if references is None:
            conditioning = self.family.condition(self.encoders, first, other, request)
        else:
            conditioning = references.condition(self.encoders, first, other, lists, request)
        return conditioning if distinct == told else conditioning.rows([distinct.index(each) for each in told])

    def _reference_latents(self, references: References | None) -> list[Tensor]:
        """One batch of a row per prompt for each picture that is looked at."""
        if references is None:
            return []
        return [self.vae.encode(each.to(self.device)).float()[list(references.rows)] for each in references.pixels]

    def _latents(self, inputs: Inputs, noise: RowNoise | None) -> Tensor:
        """One row per picture: the posterior's mean, or, with `noise`, a sample of it."""
        pixels, rows = inputs.pixels.to(self.device), list(inputs.rows)
        if noise is None:
            latents = self.vae.encode(pixels).float()[rows]
        else:
            latents = self.vae.encode(pixels[rows], noise.draw().to(self.device)).float()
        if not is_finite(latents):
            raise NonFiniteError("encode")
        return latents

    def _pixels(self, latents: Tensor, run: Encoded | None) -> Tensor:
        pixels = self.vae.decode(latents.to(self.device)).float()
        if not is_finite(pixels):
            raise NonFiniteError("decode")
        if run is None or run.mask is None or run.pixels is None:
            return pixels
        return torch.where(run.mask.to(pixels.device), pixels, run.pixels.to(pixels.device))

    def _manifest(self, request: Request, plan: Plan) -> Manifest:
        task: Task = "text-to-image" if request.image is None else "image-to-image"
        if self.editing is not None and request.image is not None and not begins_with_image(request):
            task = "edit"
        given = request.given_conditioning
        inputs: dict[str, object] = {
            "image": request.image,
            "mask_image": request.mask_image,
            "latents": request.latents,
            "conditioning": None if given is None else _tensors(given),
            "generator": [each.get_state() for each in used_generators(request)] or None,
        }
        extra = dict(self.family.described(request))
        if plan.second_prompts is not None:
            extra["prompt_2"] = list(plan.second_prompts)
        return Manifest.build(
            family=self.source.family,
            model=self.source.name,
            weights=self.source.weights,
            task=task if request.mask_image is None else "inpaint",
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
            dtype=self.dtype,
            device=self.device,
            attention=",".join(backend.name for backend in self.attention.backends),
            num_images_per_prompt=request.num_images_per_prompt,
            extra=extra,
        )


def _tensors(prompt: Prompt) -> list[Tensor]:
    parts = (prompt.positive,) if prompt.negative is None else (prompt.positive, prompt.negative)
    each = ((part.states, part.lengths, part.pooled, part.time_ids, *part.references) for part in parts)
    found = [tensor for tensors in each for tensor in tensors]
    return [tensor for tensor in found if tensor is not None]
