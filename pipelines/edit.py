"""Editing: pictures that a model looks at while it makes another (references).

Legend: P prompts, G lists of pictures, K pictures in each list, C latent channels, H W pixels, h w latent cells.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..core.naming import naming
from ..denoisers.base import Conditioning, Prompt
from ..encoders.base import TextEncoder
from .pictures import read_lists, size_text
from .request import Request
from .texts import OtherTexts

Pictures = Sequence[Tensor]
"""One list of pictures, [3, H, W] each, float32 in 0..1, of any sizes."""


class Editing(Protocol):
    """How a family edits pictures; immutable. A pipeline that has one takes `image` as pictures to look at: one, a list
    of them for all prompts, or a list of lists, one for each prompt."""

    def size(self, pictures: Pictures) -> tuple[int, int]:
        """Width and height of what is made of a list of pictures, where they are not asked for."""
        ...

    def fitted(self, picture: Tensor) -> Tensor:
        """A picture [3, H, W] in 0..1 as the autoencoder reads it, maybe of another size.

        Raises:
            ValueError: the model cannot look at it.
        """
        ...

    def condition(
        self,
        encoders: Mapping[str, TextEncoder],
        prompts: Sequence[str],
        others: OtherTexts,
        pictures: Sequence[Pictures],
        request: Request,
    ) -> Conditioning:
        """As `Family.condition`, for prompts with a list of pictures each; without their latents."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class References:
    """The pictures of a request. `lists` are G lists as given; `pixels` are, for each k < K, the k-th picture of every
    list as the autoencoder reads it, [G, 3, 1, H, W] in -1..1; `rows` says which list each of the P prompts has.

    `size` is width and height of what is made where they are not asked for.
    """

    editing: Editing
    lists: Sequence[Pictures]
    pixels: tuple[Tensor, ...]
    rows: tuple[int, ...]
    size: tuple[int, int]
    warnings: tuple[str, ...]

    @property
    def firsts(self) -> tuple[Tensor, ...]:
        """The first picture of each list, as given, [3, 1, H, W] in -1..1."""
        return tuple(pictures[0][:, None] * 2 - 1 for pictures in self.lists)

    def condition(
        self,
        encoders: Mapping[str, TextEncoder],
        prompts: Sequence[str],
        others: OtherTexts,
        lists: Sequence[int],
        request: Request,
    ) -> Conditioning:
        """What the denoiser is told for prompts whose pictures are in these lists."""
        return self.editing.condition(encoders, prompts, others, [self.lists[each] for each in lists], request)


def read_references(request: Request, editing: Editing | None) -> References | None:
    """The pictures that a request wants looked at, None where there are none.

    Raises:
        ValueError: not pictures, ones that cannot be looked at, or a number of lists that does not fit the prompts;
        lists of different lengths, or whose pictures have different sizes; a conditioning with pictures of its own that
        is given with `image`, or to a model that looks at none.
    """
    given = request.given_conditioning
    parts = () if given is None else (given.positive, given.negative)
    held = any(part is not None and part.references for part in parts)
    if held and editing is None:
        raise ValueError("conditioning: it holds references, and this model looks at no pictures")
    if held and request.image is not None and not begins_with_image(request):
        raise ValueError("image: conditioning already holds the pictures to look at; give one of the two")
    if editing is None or held or request.image is None:
        return None
    lists = read_lists(request.image)
    if len(lists) not in (1, request.num_prompts):
        raise ValueError(
            f"image holds {len(lists)} lists of pictures for {request.num_prompts} prompts; it takes one list for all, "
            "or one per prompt"
        )
    fitted = [[_fitted(editing, picture, k) for k, picture in enumerate(pictures, 1)] for pictures in lists]
    return References(
        editing=editing,
        lists=lists,
        pixels=_side_by_side(fitted),
        rows=tuple(range(len(lists))) if len(lists) > 1 else (0,) * request.num_prompts,
        size=editing.size(lists[0]),
        warnings=tuple(_changes(lists, fitted)),
    )


def check_count(pictures: Pictures, most: int) -> None:
    """Makes sure that a prompt has no more pictures than a model looks at. ValueError otherwise."""
    if len(pictures) > most:
        raise ValueError(
            f"image holds {len(pictures)} pictures for a prompt; this model looks at {most} (one for each prompt is "
            "given as [[a], [b]])"
        )


def begins_with_image(request: Request) -> bool:
    """Whether the first of the pictures is also where the run begins: a strength or a mask says so."""
    return request.strength is not None or request.mask_image is not None


def with_references(prompt: Prompt, latents: Sequence[Tensor]) -> Prompt:
    """The prompt with references [P, C, 1, h, w] on both sides; what it holds already where there are none."""
    positive, negative = prompt.positive, prompt.negative
    references = tuple(latents) or positive.references
    positive = dataclasses.replace(positive, references=references)
    if negative is not None:
        negative = dataclasses.replace(negative, references=tuple(latents) or negative.references or references)
    return Prompt(positive=positive, negative=negative)


def with_picture_states(prompt: Prompt, states: Tensor | None) -> Prompt:
    """The prompt with a picture encoder's states [P, Lp, Dv] on both sides, where there are any."""
    if states is None:
        return prompt
    negative = None if prompt.negative is None else dataclasses.replace(prompt.negative, picture_states=states)
    return Prompt(positive=dataclasses.replace(prompt.positive, picture_states=states), negative=negative)


def _fitted(editing: Editing, picture: Tensor, k: int) -> Tensor:
    with naming(f"image, picture {k}"):
        return editing.fitted(picture)


def _side_by_side(fitted: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """Lists of K pictures in 0..1 as K batches in -1..1."""
    sizes = {tuple(size_text(picture) for picture in pictures) for pictures in fitted}
    if len(sizes) > 1:
        found = " and ".join(sorted(", ".join(each) for each in sizes))
        raise ValueError(
            f"the lists of pictures in image are read at {found}; all prompts of a call take the same number of "
            "pictures, of the same sizes: call once for each"
        )
    return tuple(torch.stack(list(each))[:, :, None] * 2 - 1 for each in zip(*fitted, strict=True))


def _changes(lists: Sequence[Pictures], fitted: Sequence[Pictures]) -> list[str]:
    """What is not looked at as it was given, a line each."""
    pairs = {
        (k, size_text(given), size_text(read))
        for pictures, others in zip(lists, fitted, strict=True)
        for k, (given, read) in enumerate(zip(pictures, others, strict=True), 1)
    }
    return [f"image, picture {k}: {given} is read at {read}" for k, given, read in sorted(pairs) if given != read]
