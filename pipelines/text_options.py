"""What families make of a request's options for text encoders, and of conditioning that is given instead of prompts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..denoisers.base import Conditioning
from ..encoders.base import EncodedText, LimitedEncoder, SkippingEncoder, TextEncoder
from .request import Request

SHORTEST = 2


def check_text(request: Request, *, longest: int) -> None:
    """Makes sure that a request's `max_sequence_length` is from 2 to `longest`, and that there is a prompt where there
    is an option for reading it. ValueError otherwise."""
    length = request.max_sequence_length
    if length is not None and not SHORTEST <= length <= longest:
        raise ValueError(f"max_sequence_length is {length}; it must be from {SHORTEST} to {longest}")
    for name, value in (("max_sequence_length", length), ("clip_skip", request.clip_skip)):
        if value is not None and request.prompt is None:
            raise ValueError(f"{name}: conditioning is given, so that there is no prompt to read")


def check_pooled(request: Request) -> None:
    """Makes sure that conditioning, where it is given, has pooled vectors. ValueError otherwise."""
    for part in conditioning_given(request):
        if part.pooled is None:
            raise ValueError("conditioning: this model reads a pooled vector")


def check_unpadded(request: Request) -> None:
    """Makes sure that conditioning, where it is given, has no padding. ValueError otherwise."""
    for part in conditioning_given(request):
        if bool((part.lengths != part.states.shape[1]).any()):
            raise ValueError("conditioning: this model reads states without padding")


def conditioning_given(request: Request) -> list[Conditioning]:
    """Both sides of the conditioning that is given instead of prompts, as far as there are any."""
    given = request.given_conditioning
    return [] if given is None else [part for part in (given.positive, given.negative) if part is not None]


def options_given(request: Request, *names: str) -> dict[str, Any]:
    """Those of a request's arguments `names` that are given, for the manifest."""
    return {name: vars(request)[name] for name in names if vars(request)[name] is not None}


def conditioning_of(text: EncodedText) -> Conditioning:
    """One encoder's states, without its pooled text."""
    return Conditioning(states=text.states, lengths=text.lengths, warnings=text.warnings)


def side_by_side(encoders: Sequence[TextEncoder], texts: Sequence[EncodedText]) -> EncodedText:
    """What several encoders gave for the same rows, as states of all their widths and no pooled vectors. One that read
    fewer chunks than another goes on with its chunk of an empty prompt.

    Raises:
        ValueError: they are of different lengths that no whole chunks make up for.
    """
    longest = max(text.states.shape[1] for text in texts)
    states = [_as_long(each, text.states, longest) for each, text in zip(encoders, texts, strict=True)]
    return EncodedText(
        states=torch.cat(states, dim=-1),
        lengths=torch.stack([text.lengths for text in texts]).amax(0),
        warnings=tuple(dict.fromkeys(line for text in texts for line in text.warnings)),
    )


def _as_long(encoder: TextEncoder, states: Tensor, length: int) -> Tensor:
    """States [B, L, D] and the encoder's chunks of an empty prompt, `length` long together."""
    lacking = length - states.shape[1]
    if lacking == 0:
        return states
    empty = encoder([""]).states
    if lacking % empty.shape[1]:
        raise ValueError(
            f"text encoders gave states of {states.shape[1]} and {length} tokens; this model reads them at one length"
        )
    return torch.cat((states, empty.repeat(len(states), lacking // empty.shape[1], 1)), dim=1)


def limited(encoder: TextEncoder, request: Request) -> TextEncoder:
    """The encoder, reading at most the request's `max_sequence_length`. ValueError where that cannot be set."""
    if request.max_sequence_length is None:
        return encoder
    if not isinstance(encoder, LimitedEncoder):
        raise ValueError(f"max_sequence_length: the encoder {type(encoder).__name__} has no limit to set")
    return encoder.with_max_tokens(request.max_sequence_length)


def skipping(encoder: TextEncoder, request: Request) -> TextEncoder:
    """The encoder, read the request's `clip_skip` layers earlier. ValueError where that cannot be done."""
    if request.clip_skip is None:
        return encoder
    if not isinstance(encoder, SkippingEncoder):
        raise ValueError(f"clip_skip: the encoder {type(encoder).__name__} has no layers to skip")
    return encoder.with_clip_skip(request.clip_skip)
