"""The last stage of a run: from latents to pictures or clips.

Legend: N pictures or clips, C latent channels, F latent frames, H W pixels, h w latent cells.
"""

import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..schedulers.base import Step
from .base import Encoded, ImageStep
from .checks import check_latents
from .chunked import continued
from .finite import NonFiniteError, is_finite
from .frames import makes_clips
from .result import Result, to_images, to_videos
from .timed_decoding import ready_to_decode

if TYPE_CHECKING:
    from .image import ImagePipeline


def decode_latents(pipe: "ImagePipeline", latents: Step | Tensor, encoded: Encoded | None) -> Result:
    """See `ImagePipeline.decode`."""
    start = time.perf_counter()
    run = latents.encoded if isinstance(latents, ImageStep) else encoded
    x = _checked(pipe, latents, run)
    output_type = "pil" if run is None else run.plan.output_type
    pixels = None if output_type == "latent" else _pixels(pipe, x, run, latents)
    clips = max(pipe.recipe.num_frames, x.shape[2]) > 1 if run is None else run.plan.is_clip
    images = None if pixels is None or pixels.shape[2] > 1 else to_images(pixels, output_type)
    videos = None if pixels is None or not clips else to_videos(pixels, output_type)
    before = latents.seconds if isinstance(latents, ImageStep) else {} if run is None else run.seconds
    return Result(
        images=images,
        videos=videos,
        fps=(pipe.recipe.fps if run is None else run.plan.frame_rate or pipe.recipe.fps) if clips else None,
        latents=x.float(),
        seeds=() if run is None else run.plan.seeds,
        timings={**before, "decode": time.perf_counter() - start},
        warnings=() if run is None else run.warnings,
        manifest=None if run is None else run.manifest,
    )


def _checked(pipe: "ImagePipeline", latents: Step | Tensor, run: Encoded | None) -> Tensor:
    """Latents [N, C, F, h, w] as they are decoded. ValueError for another shape than the model's, or their run's."""
    is_step = isinstance(latents, Step)
    x = latents.latents * pipe.ends.unit(latents.sigma) if is_step else latents
    is_part = is_step and latents.chunk is not None  # of a clip, which holds the frames so far
    shape = None if run is None or is_part else run.shape
    check_latents(x, pipe.vae.latent_channels, shape, clips=makes_clips(pipe.family))
    return x


def _pixels(pipe: "ImagePipeline", x: Tensor, run: Encoded | None, latents: Step | Tensor) -> Tensor:
    """Pixels [N, 3, F, H, W] of `x`, which `latents` hold: those frames that the run was asked for, with those that it
    went on from as they were, and with the input picture's where its mask keeps them.

    Raises:
        NonFiniteError: the decoder's output is not finite.
    """
    vae, x = ready_to_decode(pipe.vae, x.to(pipe.device), run, latents.state if isinstance(latents, Step) else None)
    pixels = vae.decode(x).float()
    if not is_finite(pixels):
        raise NonFiniteError("decode")
    if run is None:
        return pixels
    if run.plan.num_given:
        pixels = torch.cat([each.to(pixels.device) for each in continued([pixels], run)], dim=2)
    if run.mask is None or run.pixels is None:
        return pixels[:, :, : run.plan.num_frames]
    return torch.where(run.mask.to(pixels.device), pixels, run.pixels.to(pixels.device))
