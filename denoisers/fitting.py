"""Whether conditioning and latents fit a model, before anything is computed; and what hides the padding of texts.

Legend: B rows, C latent channels, F frames, h w latent cells, Lt text tokens.
"""

from collections.abc import Sequence

from torch import Tensor

from ..core.attention.base import FULL, AttentionMask
from .base import Conditioning


def check_states(conditioning: Conditioning, rows: int, width: int) -> None:
    """Makes sure that text states are `width` wide, and of as many rows as the latents. ValueError otherwise."""
    found = conditioning.states.shape
    if found[2] != width:
        raise ValueError(f"text states are {found[2]} wide; this model reads states of {width}")
    if found[0] != rows:
        raise ValueError(f"text states have {found[0]} rows for {rows} rows of latents")


def check_other_states(conditioning: Conditioning, width: int) -> None:
    """Makes sure that there are states of a second text encoder, `width` wide. ValueError otherwise."""
    states, lengths = conditioning.other_states, conditioning.other_lengths
    if states is None or lengths is None or states.shape[2] != width:
        found = "none" if states is None else f"of width {states.shape[2]}"
        raise ValueError(f"states of the second text encoder are {found}; this model reads such of width {width}")


def check_unpadded(conditioning: Conditioning) -> None:
    """Makes sure that all states are of tokens, for models that attend to all of them. ValueError otherwise."""
    if not bool((conditioning.lengths == conditioning.states.shape[1]).all()):
        raise ValueError(
            "text states are padded, and this model attends to every token that it is given: the prompts of one run "
            "must have texts of the same length"
        )


def are_as_long(first: Conditioning, second: Conditioning) -> bool:
    """Whether the texts of both have one length."""
    return first.states.shape[1] == second.states.shape[1]


def check_pooled(conditioning: Conditioning, width: int) -> None:
    """Makes sure that there is pooled text, `width` wide. ValueError otherwise."""
    pooled = conditioning.pooled
    if pooled is None or pooled.shape[1] != width:
        found = "none" if pooled is None else f"of width {pooled.shape[1]}"
        raise ValueError(f"pooled text is {found}; this model reads one of width {width}")


def check_guidance(conditioning: Conditioning, *, guided: bool) -> None:
    """Makes sure that there is a guidance value where the model is told one, and none else. ValueError otherwise."""
    if guided != (conditioning.guidance is not None):
        needs = "needs a guidance value" if guided else "takes no guidance value"
        raise ValueError(f"guidance is {conditioning.guidance}; this model {needs}")


def check_cells(shape: tuple[int, ...], channels: int, patch: int) -> None:
    """Makes sure that latents of `shape` [B, C, 1, h, w] have these channels, and whole patches of cells. ValueError
    otherwise."""
    if shape[1] != channels or shape[2] != 1 or shape[3] % patch or shape[4] % patch:
        taken = f"{channels} channels, one frame, sides in steps of {patch}"
        raise ValueError(f"latents are {shape}; this model takes {taken}")


def check_clip(shape: tuple[int, ...], channels: int, patch: int) -> None:
    """Makes sure that latents of `shape` [B, C, F, h, w] have these channels, and whole patches of cells in each frame.
    ValueError otherwise."""
    if shape[1] != channels or shape[3] % patch or shape[4] % patch:
        raise ValueError(f"latents are {shape}; this model takes {channels} channels, sides in steps of {patch}")


def check_picture_states(conditioning: Conditioning, width: int | None, count: int | None) -> None:
    """Makes sure that there are states of pictures, `width` wide, where the model reads any (None: it does not), and
    `count` in each row, where that is fixed. ValueError otherwise."""
    states = conditioning.picture_states
    if states is None and width is None:
        return
    if states is None or states.shape[2] != width or states.shape[1] != (count or states.shape[1]):
        found = "none" if states is None else f"{states.shape[1]} of width {states.shape[2]}"
        needs = "none" if width is None else f"{count or 'any number'} of width {width}"
        raise ValueError(f"picture states of a row are {found}; this model reads {needs}")


def check_first_frames(found: Sequence[tuple[int, ...]], shape: tuple[int, ...]) -> None:
    """Makes sure that references of the shapes `found` are at most one: known latents of the first frames of clips of
    `shape` [B, C, F, h, w]. ValueError otherwise."""
    rows, channels, frames, *sides = shape
    fits = [each for each in found if each == (rows, channels, each[2], *sides) and each[2] <= frames]
    if fits != [*found] or len(found) > 1:
        wanted = f"at most one, of the clip's first frames, {(rows, channels, f'1 to {frames}', *sides)}"
        raise ValueError(f"references are of shapes {[*found]}; this model takes {wanted}")


def text_mask(
    lengths: Tensor, num_text: int, num_before: int, grid: tuple[int, int, int] | None = None
) -> AttentionMask:
    """Every query sees the `num_before` picture tokens and each row's own of the `num_text` text tokens after them,
    `lengths` [B]; no mask where no row is padded. The picture tokens may be those of a clip's `grid`."""
    are_whole = bool((lengths == num_text).all())
    if are_whole and grid is None:
        return FULL
    return AttentionMask(key_lengths=None if are_whole else lengths + num_before, grid=grid)
