"""Clips: how many frames they have, and pictures that they begin and end with.

Legend: N clips, K different ones, C latent channels, F frames, f latent frames, G frames in a group (those of a latent
frame but the first), H W pixels, h w latent cells, Lp picture states, Dv their width.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..schedulers import RowNoise
from ..vae.base import Autoencoder, VideoAutoencoder
from ..vae.frames import check_frames, next_frames
from .family import Family
from .finite import NonFiniteError, is_finite
from .pictures import opened, opened_clips, read_lists, resized, size_text, spread_count
from .plan import Plan
from .request import Request


@dataclass(frozen=True, kw_only=True, eq=False)
class Shown:
    """Pictures [3, H, W] in 0..1, of any sizes, that clips begin with, and end with where there are `last` ones; which
    of them each of the N clips takes."""

    first: tuple[Tensor, ...]
    last: tuple[Tensor, ...]
    rows: tuple[int, ...]
    last_rows: tuple[int, ...]

    def fitted(self, plan: Plan, group: int) -> "Fitted":
        """The pictures at the size of a run's clips, whose groups have `group` frames.

        Raises:
            ValueError: clips of this length cannot end with a picture.
        """
        if self.last:
            _check_last(plan.num_frames, group)
        size = (plan.width, plan.height)
        pairs = [*zip(self.rows, self.last_rows or self.rows, strict=True)]
        kinds = [*dict.fromkeys(pairs)]
        first, last = [self.first[i] for i, _ in kinds], [self.last[i] for _, i in kinds] if self.last else []
        return Fitted(
            first=at_size(first, size),
            last=at_size(last, size) if last else None,
            pictures=tuple(zip(first, last, strict=True)) if last else tuple((each,) for each in first),
            rows=tuple(kinds.index(pair) for pair in pairs),
            num_frames=1 + (plan.latent_frames - 1) * group,
            warnings=(*stretched("image", self.first, size), *stretched("last_image", self.last, size)),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Fitted:
    """What K different clips show: their `first` and `last` frames [K, 3, 1, H, W] in -1..1, and the `pictures` that
    these were made of, as given; which of them each of the N clips is, and how many frames are made of all."""

    first: Tensor
    last: Tensor | None
    pictures: tuple[tuple[Tensor, ...], ...]
    rows: tuple[int, ...]
    num_frames: int
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Seen:
    """What a denoiser is told of pictures: latents or channels [N, C', f, h, w], and states [N, Lp, Dv]."""

    beside: Tensor | None = None
    states: Tensor | None = None


class PictureEncoder(Protocol):
    """From pictures to states."""

    def __call__(self, pictures: Sequence[Tensor]) -> Tensor:
        """States [K, Lp, Dv] of K pictures [3, H, W] in 0..1, of any sizes."""
        ...


class Looking(Protocol):
    """How a family sees the pictures that its clips begin with; immutable."""

    def check(self, request: Request) -> None:
        """Refuse, with a ValueError, a request without a picture that is needed, or with one too many."""
        ...

    def see(self, fitted: Fitted, vae: Autoencoder, device: torch.device, noise: RowNoise) -> Seen:
        """What the denoiser is told, computed on the device. `noise` stands before the initial noise.

        Raises:
            NonFiniteError: a result is not finite.
        """
        ...


@runtime_checkable
class SizingLooking(Looking, Protocol):
    """One that also says how large clips are, where a request does not."""

    def size(self, picture: Tensor) -> tuple[int, int]:
        """Width and height of a clip that begins with a picture [3, H, W]."""
        ...


@dataclass(frozen=True, kw_only=True)
class FirstLatents:
    """The denoiser takes latents of the first frame as they are; clips need not begin with a picture. `draws`: they are
    a sample of the autoencoder's posterior, drawn before the initial noise, else its mean."""

    draws: bool = False

    def check(self, request: Request) -> None:
        """There is no last picture."""
        if request.last_image is not None:
            raise ValueError("last_image: clips of this model can begin with a picture, not end with one")
        if request.image is not None and (request.video is not None or request.strength is not None):
            raise ValueError("image: a clip begins with it, or starts from a video with a strength; give one")

    def see(self, fitted: Fitted, vae: Autoencoder, device: torch.device, noise: RowNoise) -> Seen:
        """The latents [N, C, 1, h, w]."""
        first = fitted.first.to(device)
        if not self.draws:
            return as_seen(fitted, vae.encode(first).float(), None)
        sample = vae.encode(first[list(fitted.rows)], noise.draw_frames(1).to(device)).float()
        return _checked(Seen(beside=sample))


@dataclass(frozen=True, kw_only=True)
class BesideLatents:
    """The denoiser reads beside its latents, a mask of the frames that are shown, and latents of a clip that is grey
    but for these; with an `encoder`, also its states of the pictures. `needs_last`: it was made for clips that end with
    a picture too, else `takes_last` says whether they can."""

    encoder: PictureEncoder | None = field(default=None, compare=False)
    needs_last: bool = False
    takes_last: bool = True

    def check(self, request: Request) -> None:
        """The pictures that the model needs are there."""
        if request.image is None:
            raise ValueError("image is not given; this model makes clips that begin with one")
        if self.needs_last and request.last_image is None:
            raise ValueError("last_image is not given; this model makes clips from a first to a last picture")
        if request.last_image is not None and not (self.needs_last or self.takes_last):
            raise ValueError("last_image: clips of this model begin with a picture, and cannot end with one")

    def see(self, fitted: Fitted, vae: Autoencoder, device: torch.device, noise: RowNoise) -> Seen:
        """The mask and the latents [N, G + C, f, h, w], and the states, the last picture's after the first's."""
        first, *last = [fitted.first] if fitted.last is None else [fitted.first, fitted.last]
        count = fitted.num_frames - 1 - len(last)
        grey = first.new_zeros(()).expand(len(first), 3, count, *first.shape[3:])
        latents = vae.encode(torch.cat((first, grey, *last), dim=2).to(device)).float()
        mask = latents.new_zeros(len(latents), frames_in_group(vae), *latents.shape[2:])
        mask[:, :, 0] = 1
        if last:
            mask[:, -1, -1] = 1
        states = None if self.encoder is None else self._states(self.encoder, fitted.pictures)
        return as_seen(fitted, torch.cat((mask, latents), dim=1), None if states is None else states.to(device))

    def _states(self, encoder: PictureEncoder, pictures: Sequence[Sequence[Tensor]]) -> Tensor:
        """[K, Lp, Dv], those of a clip's pictures one after the other."""
        each = encoder([picture for pair in pictures for picture in pair])
        return each.unflatten(0, (len(pictures), -1)).flatten(1, 2)


def read_shown(request: Request, looking: Looking | None) -> Shown | None:
    """The pictures that a request's clips begin and end with; None where there are none.

    Raises:
        ValueError: not pictures, or a number of them that fits neither prompts nor clips; pictures that the model needs
        or does not take.
    """
    if looking is None:
        return None
    looking.check(request)
    if request.image is None:
        return None
    counts = (request.num_prompts, request.num_images_per_prompt)
    first = single_pictures(request.image, "image")
    last = () if request.last_image is None else single_pictures(request.last_image, "last_image")
    return Shown(
        first=first,
        last=last,
        rows=spread_count(len(first), "image", *counts),
        last_rows=spread_count(len(last), "last_image", *counts) if last else (),
    )


def with_size(request: Request, shown: Shown | None, looking: Looking | None) -> Request:
    """The request at the size that the pictures which its clips begin with ask for, as far as it says none.

    Raises:
        ValueError: pictures that ask for different sizes.
    """
    if shown is None or not isinstance(looking, SizingLooking) or None not in (request.width, request.height):
        return request
    sizes = sorted({looking.size(picture) for picture in shown.first})
    if len(sizes) > 1:
        found = " and ".join(f"{width}x{height}" for width, height in sizes)
        raise ValueError(f"image: the pictures ask for clips of {found}; give a width and a height for all")
    ((width, height),) = sizes
    return dataclasses.replace(request, width=request.width or width, height=request.height or height)


def with_pictures(request: Request) -> Request:
    """The request with its pictures in place of their files, so that each of these is read once.

    Raises:
        ValueError, FileNotFoundError: no file of a picture.
    """
    given = {name: vars(request)[name] for name in ("image", "mask_image", "last_image")}
    read = {name: opened(value) for name, value in given.items()}
    changed = {name: value for name, value in read.items() if value is not given[name]}
    return dataclasses.replace(request, **changed) if changed else request


def with_frames(request: Request) -> Request:
    """The request with the frames of its clip in place of a file, or of files of single frames.

    Raises:
        ValueError, FileNotFoundError: no file of a clip.
    """
    video = opened_clips(request.video)
    return request if video is request.video else dataclasses.replace(request, video=video)


def makes_clips(family: Family) -> bool:
    """Whether a family's results may be clips."""
    return "num_frames" in family.arguments


def frames_in_group(vae: Autoencoder) -> int:
    """Frames of a latent frame but the first."""
    return vae.temporal_downsampling if isinstance(vae, VideoAutoencoder) else 1


def whole_groups(pixels: Tensor, vae: Autoencoder) -> Tensor:
    """Clips [K, 3, F, H, W], whose last frame stays until its group is whole."""
    count = next_frames(pixels.shape[2], frames_in_group(vae)) - pixels.shape[2]
    return torch.cat((pixels, pixels[:, :, -1:].expand(-1, -1, count, -1, -1)), dim=2) if count else pixels


def _check_last(num_frames: int, group: int) -> None:
    """Makes sure that a clip can end with a picture: no frame is cut off, and there is another one. ValueError."""
    check_frames(num_frames, group)
    if num_frames == 1:
        raise ValueError(f"last_image: a clip of 1 frame ends where it begins; num_frames must be at least {1 + group}")


def single_pictures(given: object, name: str) -> tuple[Tensor, ...]:
    """Pictures [3, H, W] in 0..1, of any sizes, none of them in a list of its own. Errors as for `read_lists`."""
    lists = read_lists(given, name)  # pyright: ignore[reportArgumentType] (checked there)
    if len(lists) > 1:
        raise ValueError(f"{name} holds lists of pictures; it takes one picture, or one for each prompt or clip")
    return lists[0]


def at_size(pictures: Sequence[Tensor], size: tuple[int, int]) -> Tensor:
    """[K, 3, 1, H, W] in -1..1."""
    same = [each if (each.shape[2], each.shape[1]) == size else resized(each, *size) for each in pictures]
    return torch.stack(same)[:, :, None] * 2 - 1


def stretched(name: str, pictures: Sequence[Tensor], size: tuple[int, int]) -> list[str]:
    """What is not seen at the size that it was given in, a line each."""
    found = dict.fromkeys(size_text(each) for each in pictures)
    return [f"{name}: {each} is resized to {size[0]}x{size[1]}" for each in found if each != f"{size[0]}x{size[1]}"]


def as_seen(fitted: Fitted, beside: Tensor, states: Tensor | None) -> Seen:
    """What K clips show, as rows of N.

    Raises:
        NonFiniteError: a result is not finite.
    """
    rows = list(fitted.rows)
    _checked(Seen(beside=beside, states=states))
    return Seen(beside=beside[rows], states=None if states is None else states[rows])


def _checked(seen: Seen) -> Seen:
    if not all(each is None or is_finite(each) for each in (seen.beside, seen.states)):
        raise NonFiniteError("encode")
    return seen
