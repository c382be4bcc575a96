"""Pictures and clips that clips show at given frames: read, made to fit, and put into latents.

Source: diffusers' LTXConditionPipeline.

Legend: N clips, K different ones, C latent channels, F frames shown, n latent frames of these, f latent frames of the
clip, H W pixels, h w latent cells.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..core.naming import naming
from ..schedulers import RowNoise
from ..vae.base import Autoencoder
from ..vae.frames import next_frames
from .conditions import Condition
from .finite import NonFiniteError, is_finite
from .frames import at_size, frames_in_group, single_pictures, stretched
from .held import GivenFrames, Held
from .pictures import read_videos, spread_count
from .plan import Plan
from .request import Request

NUM_AHEAD = 2
"""So many latent frames of a clip that is shown later go ahead; the others take the places of the clip's own."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Placing:
    """What a request's clips show at frames, by the names that errors have for them. `noise_scale`: see `Held`."""

    conditions: Sequence[tuple[str, Condition]]
    noise_scale: float


@runtime_checkable
class PlacingFamily(Protocol):
    """A family whose clips show pictures and clips at given frames."""

    def placing(self, request: Request) -> Placing | None:
        """What a request's clips show, None where that is nothing."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Excerpt:
    """A condition that was read: K clips [F, 3, H, W] in 0..1, of one length and any sizes, and which of them each of
    the N clips takes."""

    name: str
    clips: tuple[Tensor, ...]
    rows: tuple[int, ...]
    frame_index: int
    strength: float

    @property
    def num_frames(self) -> int:
        """F."""
        return len(self.clips[0])

    def check_fits(self, num_frames: int, group: int) -> None:
        """Makes sure that it lies within clips of `num_frames`, and between their groups of frames where it has to.

        Raises:
            ValueError: it does not.
        """
        place, count = self.frame_index, self.num_frames
        if place >= num_frames:
            raise ValueError(f"{self.name}: frame_index is {place}; frames of this clip are from 0 to {num_frames - 1}")
        above = next_frames(count, group)
        if above != count:
            near = f"{above - group} or {above}"
            raise ValueError(f"{self.name}: video has {count} frames; it must have 1 or {group} more, such as {near}")
        if place + count > num_frames:
            ends = f"the clip has {num_frames}, so that there is room for {num_frames - place}"
            raise ValueError(f"{self.name}: video has {count} frames from frame {place} on; {ends}")
        if place % group and 1 + (count - 1) // group > NUM_AHEAD:
            near = f"{place - place % group} or {place - place % group + group}"
            raise ValueError(
                f"{self.name}: frame_index is {place}; a video of {count} frames begins at a multiple of {group}, such "
                f"as {near}"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class Excerpts:
    """Those of a request."""

    each: tuple[Excerpt, ...]
    noise_scale: float

    def fitted(self, plan: Plan, group: int) -> "Placed":
        """They at the size of a run's clips. ValueError for one that does not fit these."""
        for excerpt in self.each:
            excerpt.check_fits(plan.num_frames, group)
        size = (plan.width, plan.height)
        clips = [(excerpt.name, [*clip]) for excerpt in self.each for clip in excerpt.clips]
        changed = [line for name, frames in clips for line in stretched(name, frames, size)]
        return Placed(
            each=tuple((excerpt, _pixels(excerpt, size)) for excerpt in self.each),
            noise_scale=self.noise_scale,
            warnings=tuple(dict.fromkeys(changed)),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Placed:
    """Excerpts and their pixels [K, 3, F, H, W] in -1..1, at the size of a run's clips."""

    each: tuple[tuple[Excerpt, Tensor], ...]
    noise_scale: float
    warnings: tuple[str, ...]

    def held(
        self, vae: Autoencoder, device: torch.device, noise: RowNoise, shape: tuple[int, ...], *, drawn: bool
    ) -> Held | None:
        """What a run with latents of `shape` [N, C, f, h, w] is given, computed on the device; None where no strength
        is over 0. `noise` stands before the initial noise, which is `drawn` first unless that is given.

        Raises:
            NonFiniteError: latents are not finite.
        """
        strong = [(excerpt, pixels) for excerpt, pixels in self.each if excerpt.strength > 0]
        if not strong:
            return None
        if drawn:
            noise.draw()
        group = frames_in_group(vae)
        inside, ahead = list[GivenFrames](), list[GivenFrames]()
        for excerpt, pixels in strong:
            latents, strength = _latents(excerpt, pixels.to(device), vae, noise), excerpt.strength
            if excerpt.frame_index == 0:
                inside.append(GivenFrames(latents=latents, place=0, strength=strength))
                continue
            ahead.append(_ahead(excerpt, latents[:, :, :NUM_AHEAD], noise))
            place, rest = excerpt.frame_index // group + NUM_AHEAD, latents[:, :, NUM_AHEAD:]
            inside.append(GivenFrames(latents=rest, place=place, strength=strength))
        return Held(
            inside=tuple(inside),
            ahead=tuple(ahead),
            num_frames=shape[2],
            group=group,
            noise=noise.state(),
            noise_scale=self.noise_scale,
        )


def read_placing(family: object, request: Request) -> Excerpts | None:
    """What a request's clips show at frames, where they do.

    Raises:
        ValueError: no pictures or clips, or a number of them that fits neither prompts nor clips.
    """
    placing = family.placing(request) if isinstance(family, PlacingFamily) else None
    if placing is None:
        return None
    counts = (request.num_prompts, request.num_images_per_prompt)
    each = tuple(_read(name, condition, counts) for name, condition in placing.conditions)
    return Excerpts(each=each, noise_scale=placing.noise_scale)


def _read(name: str, condition: Condition, counts: tuple[int, int]) -> Excerpt:
    if condition.video is None:
        clips = tuple(picture[None] for picture in single_pictures(condition.image, name))
        rows = spread_count(len(clips), name, *counts)
    else:
        with naming(name):
            pixels = read_videos(condition.video)
            clips = tuple((pixels.transpose(1, 2) + 1) / 2)
            rows = spread_count(len(clips), "video", *counts)
    return Excerpt(
        name=name, clips=clips, rows=rows, frame_index=condition.frame_index, strength=float(condition.strength)
    )


def _pixels(excerpt: Excerpt, size: tuple[int, int]) -> Tensor:
    """[K, 3, F, H, W] in -1..1."""
    return torch.stack([at_size([*clip], size)[:, :, 0].transpose(0, 1) for clip in excerpt.clips])


def _latents(excerpt: Excerpt, pixels: Tensor, vae: Autoencoder, noise: RowNoise) -> Tensor:
    """A sample of the posterior, [N, C, n, h, w], each row's by its own generator."""
    count = 1 + (excerpt.num_frames - 1) // frames_in_group(vae)
    latents = vae.encode(pixels[list(excerpt.rows)], noise.draw_frames(count).to(pixels.device)).float()
    if not is_finite(latents):
        raise NonFiniteError("encode")
    return latents


def _ahead(excerpt: Excerpt, latents: Tensor, noise: RowNoise) -> GivenFrames:
    """Latents [N, C, n, h, w] with noise as far as they are not sure."""
    drawn = noise.draw_frames(latents.shape[2]).to(latents.device)
    begun = torch.lerp(drawn, latents, excerpt.strength)
    return GivenFrames(latents=begun, place=excerpt.frame_index, strength=excerpt.strength)
