"""Pictures that clips of HunyuanVideo 1.5 begin with: at which size, and how they are seen.

Source: diffusers' HunyuanVideo15ImageProcessor and HunyuanVideo15ImageToVideoPipeline.

Legend: K different clips, C latent channels, f latent frames, H W pixels, h w latent cells.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..schedulers import RowNoise
from ..vae.base import Autoencoder
from .frames import BesideLatents, Fitted, Seen, as_seen, frames_in_group
from .pictures import centre_crop, resized

MAX_RATIO = 4.0


@dataclass(frozen=True, kw_only=True)
class CroppedBeside(BesideLatents):
    """The denoiser reads beside its latents, those of the middle of a picture in the first frame and zeros in all
    others, and a mask of that frame; and a picture encoder's states of the same. Clips have about `target` squared
    pixels, in steps of `unit` a side."""

    target: int
    unit: int
    takes_last: bool = False

    def size(self, picture: Tensor) -> tuple[int, int]:
        """See `SizingLooking`."""
        height, width = picture.shape[1:]
        return closest_size(width, height, self.target, self.unit)

    def see(self, fitted: Fitted, vae: Autoencoder, device: torch.device, noise: RowNoise) -> Seen:
        """The latents and the mask [N, C + 1, f, h, w], and the states."""
        height, width = fitted.first.shape[3:]
        pictures = [covering(picture, width, height) for picture, *_ in fitted.pictures]
        latents = vae.encode((torch.stack(pictures)[:, :, None] * 2 - 1).to(device)).float()
        rows, channels, _, *sides = latents.shape
        beside = latents.new_zeros(rows, channels + 1, 1 + (fitted.num_frames - 1) // frames_in_group(vae), *sides)
        beside[:, :channels, :1] = latents
        beside[:, channels:, 0] = 1
        states = None if self.encoder is None else self.encoder(pictures).to(device)
        return as_seen(fitted, beside, states)


def covering(picture: Tensor, width: int, height: int) -> Tensor:
    """The middle of a picture [3, H, W], which is resized so that it just covers the other size."""
    _, tall, wide = picture.shape
    is_wider = width / height > wide / tall
    size = (width, tall * width // wide) if is_wider else (wide * height // tall, height)
    return centre_crop(resized(picture, *size), width, height)


def closest_size(width: int, height: int, target: int, unit: int) -> tuple[int, int]:
    """Of the sizes with about `target` squared pixels, the one whose aspect comes nearest to that of width and height
    on the side of the square."""
    sizes = _sizes(target, unit)
    aspect = height / width
    rest = [round(tall / wide, 5) - aspect for wide, tall in sizes]
    fits = [n for n, each in enumerate(rest) if (each <= 0 if aspect >= 1 else each >= 0)]
    return sizes[min(fits, key=lambda n: abs(rest[n]))]


def _sizes(target: int, unit: int) -> list[tuple[int, int]]:
    """Widths and heights in steps of `unit`, the tallest first; each as wide as it can be."""
    area = round((target / unit) ** 2)
    found: list[tuple[int, int]] = []
    rows, columns = area, 1
    while rows > 0:
        if max(rows, columns) <= MAX_RATIO * min(rows, columns):
            found.append((columns * unit, rows * unit))
        if (columns + 1) * rows <= area:
            columns += 1
        else:
            rows -= 1
    return found
