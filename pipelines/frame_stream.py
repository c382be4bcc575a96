"""The frames of clips as they are ready: decoded while the rest of the clip is still to be made.

Legend: N clips, C latent channels, f latent frames, F frames, H W pixels, h w latent cells.
"""

from collections.abc import Iterator
from threading import Event
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..vae.base import Autoencoder, ContinuingAutoencoder, VideoAutoencoder
from .base import Encoded, ImageStep, last
from .chunked import continued
from .ends import Ends
from .family import Family
from .finite import NonFiniteError, is_finite
from .frames import makes_clips
from .plan import asks_for_clip
from .recipe import Recipe
from .request import Request
from .result import to_videos
from .timed_decoding import ready_to_decode
from .walk import stop_if_cancelled

if TYPE_CHECKING:
    from .result import Videos


def check_streams(family: Family, recipe: Recipe, request: Request) -> None:
    """Makes sure that there will be frames. ValueError otherwise."""
    if not makes_clips(family):
        raise ValueError("this model makes pictures, not clips: there are no frames to stream")
    if not asks_for_clip(request, recipe):
        raise ValueError(
            "num_frames is not given: without it this model makes a picture, which has no frames to stream"
        )
    if request.output_type == "latent":
        raise ValueError("output_type is 'latent', which decodes no frames; stream(...) has the latents of each step")


@torch.no_grad()
def streamed_frames(
    steps: Iterator[ImageStep], encoded: Encoded, vae: Autoencoder, ends: Ends, cancel: Event | None
) -> "Iterator[Videos]":
    """The frames of a run of `steps`, exactly those that were asked for. Errors as for `ImagePipeline.stream_frames`;
    `cancel` stops what is left to decode, too."""
    left = encoded.plan.num_frames
    if isinstance(vae, ContinuingAutoencoder) and encoded.plan.decoding is None:
        groups = vae.stream_stretches(_finished(steps, ends, cancel))
    else:
        groups = _whole(steps, encoded, vae, ends, cancel)
    for pixels in continued(groups, encoded):
        group = pixels[:, :, :left].float()
        if not is_finite(group):
            raise NonFiniteError("decode")
        left -= group.shape[2]
        videos = to_videos(group, encoded.plan.output_type) if group.shape[2] else None
        if videos is not None:
            yield videos


def _finished(steps: Iterator[ImageStep], ends: Ends, cancel: Event | None) -> Iterator[Tensor]:
    """Latents [N, C, 1, h, w] frame by frame, once no step will change them."""
    done = 0
    for step in steps:
        if step.sigma > 0 and step.index + 1 < step.total:
            continue
        for latents in (step.latents[:, :, done:] * ends.unit(step.sigma)).split(1, dim=2):
            stop_if_cancelled(cancel, step)
            yield latents
        done = step.latents.shape[2]


def _whole(
    steps: Iterator[ImageStep], encoded: Encoded, vae: Autoencoder, ends: Ends, cancel: Event | None
) -> Iterator[Tensor]:
    """Pixels [N, 3, F, H, W] of the last step, in groups as they come, where the autoencoder can."""
    step = last(steps)
    vae, latents = ready_to_decode(vae, step.latents * ends.unit(step.sigma), encoded, step.state)
    stop_if_cancelled(cancel, step)
    groups = vae.stream_decode(latents) if isinstance(vae, VideoAutoencoder) else iter((vae.decode(latents),))
    for group in groups:
        yield group
        stop_if_cancelled(cancel, step)
