"""The pipeline of pictures and clips: from text and from pictures, inpainting and editing.

Legend: N pictures or clips, C latent channels, F latent frames, H W pixels, h w latent cells.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from ..core.attention.base import AttentionSelector
from ..core.copies import moved
from ..denoisers.base import Denoiser
from ..encoders.base import TextEncoder
from ..schedulers.base import State, Step
from ..vae.base import Autoencoder
from ..vae.preview import LatentPreview
from .arguments import ImageArguments
from .base import Encoded, ImageStep, OnStep, Source
from .causal_walk import CausalWalk
from .checks import check_cancel, check_kind, check_on_step
from .chunked import chunks_of
from .damage import damage_named, naming_damage
from .decoding import decode_latents
from .edit import Editing
from .encoding import encode_request
from .ends import Ends, FlowEnds
from .family import Family, PlainFamily
from .frame_stream import check_streams, streamed_frames
from .frames import Looking
from .held_walk import HeldWalk
from .inpaint import MaskReader
from .origin import Origin
from .placement import device_named, dtype_named
from .progress import Progress
from .recipe import Recipe
from .request import Request
from .result import Result, to_sheets
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
        encoded = self.encode(self._request(prompt, arguments))
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
        return self.denoise(self.encode(self._request(prompt, arguments)), cancel=cancel)

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
        request = self._request(prompt, arguments)
        check_streams(self.family, self.recipe, request)
        encoded = self.encode(request)
        frames = streamed_frames(self._steps(encoded, None, cancel), encoded, self.vae, self.ends, cancel)
        return naming_damage(self, frames)

    @torch.no_grad()
    def encode(self, request: Request) -> Encoded:
        """Everything before the first step: choices, conditioning, the latents of input pictures.

        Raises:
            ValueError, FileNotFoundError: before anything is computed. NonFiniteError: an encoder's output is not
            finite.
        """
        check_kind("request", request, Request, "a Request")
        with damage_named(self):
            return encode_request(self, request)

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
        return naming_damage(self, self._steps(encoded, resume, cancel))

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
        with damage_named(self):
            return decode_latents(self, latents, encoded)

    def preview(self, step: Step) -> "list[Image]":
        """Small pictures, a pixel per latent cell, of what the step expects the result to be, of a clip its latent
        frames on one sheet; no decoder is run.

        Raises:
            ValueError: not a step, or the model has no preview projection.
        """
        check_kind("step", step, Step, "a step")
        if self.preview_projection is None:
            raise ValueError(f"{self.source.name} has no preview projection; decode the step instead")
        return to_sheets(self.preview_projection(step.denoised))

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

    def _steps(self, encoded: Encoded, resume: State | None, cancel: Event | None) -> Iterator[ImageStep]:
        """As `denoise`, but no weights are looked at where values are not finite."""
        whole = Walk if encoded.held is None else HeldWalk
        kind = whole if chunks_of(self.denoiser) is None else CausalWalk
        walk = kind(
            denoiser=self.denoiser,
            attention=self.attention,
            ends=self.ends,
            downsampling=self.vae.downsampling,
            encoded=encoded,
        )
        return walk.steps(resume, cancel)

    def _request(self, prompt: str | Sequence[str] | None, arguments: ImageArguments) -> Request:
        return Request.of(prompt, arguments, self.source.family, self.family.arguments)
