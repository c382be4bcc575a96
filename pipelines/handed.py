"""Latents that one run hands on to another: a base model's, where its refiner goes on.

Legend: N pictures, K latents given, C latent channels, h w latent cells.
"""

import dataclasses
from typing import cast

import torch
from torch import Tensor

from .pictures import spread
from .request import Request
from .values import kind


def read_handed(request: Request, channels: int) -> Tensor | None:
    """The latents [N, C, 1, h, w], float32 on the CPU, where `denoising_start` says that `image` holds such; else None.

    Raises:
        ValueError: something else, latents of another model or that are not finite, or an argument that does not go
        with them.
    """
    if request.denoising_start is None:
        return None
    for name in ("strength", "mask_image", "latents"):
        if vars(request)[name] is not None:
            raise ValueError(f"{name}: denoising_start goes on with another run's latents, which it does not go with")
    given, wanted = cast(object, request.image), f"another run's latents, [N, {channels}, 1, h, w]"
    if not isinstance(given, Tensor) or given.ndim not in (4, 5) or not given.is_floating_point():
        found = "not given" if given is None else kind(given)
        raise ValueError(f"image is {found}; with denoising_start it must be {wanted}")
    latents = given[:, :, None] if given.ndim == 4 else given
    if latents.shape[1:3] != (channels, 1) or 0 in latents.shape:
        raise ValueError(f"image has shape {tuple(given.shape)}; with denoising_start it must be {wanted}")
    if not bool(latents.isfinite().all()):
        raise ValueError("image holds latents that are not finite")
    rows = spread(latents, "image", request.num_prompts, request.num_images_per_prompt)
    return latents.detach().to("cpu", torch.float32, copy=True)[list(rows)]


def sized(request: Request, latents: Tensor, downsampling: int) -> Request:
    """The request at the size of the latents that it goes on with.

    Raises:
        ValueError: it asks for another size.
    """
    for name, cells in (("height", latents.shape[3]), ("width", latents.shape[4])):
        asked: int | None = vars(request)[name]
        if asked not in (None, cells * downsampling):
            raise ValueError(f"{name} is {asked}; the latents in image are those of {cells * downsampling} pixels")
    return dataclasses.replace(request, height=latents.shape[3] * downsampling, width=latents.shape[4] * downsampling)
