"""Latents as tokens and back.

Legend: B rows, C latent channels, F frames, h w latent cells, P cells per token side.
"""

from collections.abc import Sequence

from torch import Tensor


def patchify(x: Tensor, patch: int) -> Tensor:
    """Latents [B, C, F, h, w] to tokens [B, F h w / P^2, C P P], channel-major."""
    h = x.unflatten(4, (-1, patch)).unflatten(3, (-1, patch))  # [B, C, F, h/P, P, w/P, P]
    return h.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)


def unpatchify(tokens: Tensor, shape: Sequence[int], patch: int) -> Tensor:
    """The inverse of `patchify`; `shape` is [B, C, F, h, w]."""
    _, channels, frames, height, width = shape
    h = tokens.unflatten(1, (frames, height // patch, width // patch)).unflatten(-1, (channels, patch, patch))
    return h.permute(0, 4, 1, 2, 5, 3, 6).flatten(5).flatten(3, 4)


def patchify_channels_last(x: Tensor, patch: int) -> Tensor:
    """Latents [B, C, F, h, w] to tokens [B, F h w / P^2, P P C]: cell by cell, each with all its channels."""
    return patchify(x, patch).unflatten(-1, (x.shape[1], -1)).transpose(-1, -2).flatten(-2)


def unpatchify_channels_last(tokens: Tensor, shape: Sequence[int], patch: int) -> Tensor:
    """The inverse of `patchify_channels_last`; `shape` is [B, C, F, h, w]."""
    return unpatchify(tokens.unflatten(-1, (-1, shape[1])).transpose(-1, -2).flatten(-2), shape, patch)
