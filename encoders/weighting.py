"""Prompts with weights: `a (red:1.3) fox` turns the encoder's attention to "red" up.

Legend: B rows, L tokens, D width.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from .base import EncodedText, LimitedEncoder, StoredEncoder, TextEncoder

EMPHASIS = 1.1
LARGEST = 1e30
_WEIGHT = re.compile(r"(.*):\s*([+-]?(?:\d+\.?\d*|\.\d+))\s*", re.DOTALL)


@runtime_checkable
class PlacedEncoder(TextEncoder, Protocol):
    """A text encoder that knows which token came from where."""

    def places(self, prompts: Sequence[str]) -> list[list[int]]:
        """For each row and each of its first tokens, the place of one of its characters; -1 for tokens of no text."""
        ...


@dataclass(frozen=True, kw_only=True)
class WeightedEncoder:
    """An encoder of prompts with weights: `z = z0 + w (z - z0)` for each token's state z, where z0 is what the encoder
    gives an empty prompt at the same place (zero past its end), as in ComfyUI. `pooled` is not weighted.

    `(text)` weighs 1.1, `(text:1.3)` what it says; inside each other they multiply. `\\(` and `\\)` are plain
    parentheses, and so is one without its other half. Where every weight is 1 the result is the encoder's own, bit by
    bit.
    """

    encoder: PlacedEncoder

    def __post_init__(self) -> None:
        if not isinstance(cast(object, self.encoder), PlacedEncoder):
            kind = type(self.encoder).__name__
            raise ValueError(
                f"encoder is of type {kind}, which cannot tell where its tokens are; weights need a ClipEncoder or a "
                "T5Encoder"
            )

    def with_max_tokens(self, max_tokens: int) -> "WeightedEncoder":
        """The same over an encoder that reads at most so many tokens.

        Raises:
            ValueError: the encoder's length cannot be set.
        """
        if not isinstance(self.encoder, LimitedEncoder):
            raise ValueError(f"the length of the encoder {type(self.encoder).__name__} cannot be set")
        return WeightedEncoder(encoder=self.encoder.with_max_tokens(max_tokens))

    def resident(self) -> "WeightedEncoder":
        """The same over an encoder with its weights in memory."""
        if not isinstance(self.encoder, StoredEncoder):
            return self
        return WeightedEncoder(encoder=cast(PlacedEncoder, self.encoder.resident()))

    def __call__(self, prompts: Sequence[str]) -> EncodedText:
        """The encoder's result with weighted states. Errors as for the encoder."""
        if isinstance(prompts, str) or not all(isinstance(each, str) for each in cast(Sequence[object], prompts)):
            return self.encoder(prompts)  # refuses them
        weighted = [parse_weights(prompt) for prompt in prompts]
        texts = [each.text for each in weighted]
        encoded = self.encoder(texts)
        if all(weight == 1 for each in weighted for weight in each.weights):
            return encoded
        weights = torch.ones(encoded.states.shape[:2])
        for row, places in enumerate(self.encoder.places(texts)):
            found = [1.0 if place < 0 else weighted[row].weights[place] for place in places]
            weights[row, : len(found)] = torch.tensor(found)
        return replace(encoded, states=_weigh(encoded.states, self._empty(encoded.states), weights))

    def _empty(self, states: Tensor) -> Tensor:
        """The states of an empty prompt [L, D], again for each chunk, zero past their end."""
        encoded, width = self.encoder([""]).states[0], states.shape[1]
        if width % encoded.shape[0] == 0 and encoded.shape[0] > 1:
            return encoded.repeat(width // encoded.shape[0], 1)
        return torch.cat((encoded, encoded.new_zeros(width - encoded.shape[0], encoded.shape[1])))


@dataclass(frozen=True, kw_only=True)
class WeightedText:
    """A prompt without its brackets, and the weight of each character."""

    text: str
    weights: tuple[float, ...]


def parse_weights(prompt: str) -> WeightedText:
    """A prompt's text and weights.

    Raises:
        ValueError: a weight that is too large to be a number.
    """
    pairs = _pairs(prompt)
    text: list[str] = []
    weights: list[float] = []
    opened: list[int] = []  # where in `text` the groups that are open begin
    place = 0
    while place < len(prompt):
        letter = prompt[place]
        if letter == "\\" and prompt[place + 1 : place + 2] in ("(", ")"):
            place += 1
            text.append(prompt[place])
            weights.append(1.0)
        elif letter == "(" and place in pairs:
            opened.append(len(text))
        elif letter == ")" and place in pairs.values():
            _close(text, weights, opened.pop())
        else:
            text.append(letter)
            weights.append(1.0)
        place += 1
    if not all(abs(weight) <= LARGEST for weight in weights):
        raise ValueError(f"the weight {max(weights, key=abs):g} in the prompt is too large")
    return WeightedText(text="".join(text), weights=tuple(weights))


def _close(text: list[str], weights: list[float], start: int) -> None:
    """Ends the group that begins at `start`: its weight is the number after its last colon, if there is one."""
    match = _WEIGHT.fullmatch("".join(text[start:]))
    weight = EMPHASIS if match is None else float(match[2])
    if match is not None:
        del text[start + len(match[1]) :], weights[start + len(match[1]) :]
    weights[start:] = [weight * each for each in weights[start:]]


def _pairs(prompt: str) -> dict[int, int]:
    """Where parentheses open, and where each one closes; those escaped or without their other half are left out."""
    pairs: dict[int, int] = {}
    opened: list[int] = []
    for match in re.finditer(r"\\[()]|[()]", prompt):
        if match.group() == "(":
            opened.append(match.start())
        elif match.group() == ")" and opened:
            pairs[opened.pop()] = match.start()
    return pairs


def _weigh(states: Tensor, empty: Tensor, weights: Tensor) -> Tensor:
    """States [B, L, D] moved away from the empty prompt's [L, D] by weights [B, L]; those of weight 1 stay as they
    are.
    """
    w = weights.to(states.device)[..., None]
    moved = empty.float() + w * (states.float() - empty.float())
    return torch.where(w == 1, states, moved.to(states.dtype))
