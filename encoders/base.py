"""What every text encoder gives.

Legend: B rows, L tokens, D width, Dp width of the pooled vector.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class EncodedText:
    """Prompts as a denoiser reads them: `states` [B, L, D], zero past each row's `lengths` [B] int64, and what the user
    should know. `pooled` [B, Dp] is each whole prompt as one vector, from encoders that give one.
    """

    states: Tensor
    lengths: Tensor
    warnings: tuple[str, ...] = ()
    pooled: Tensor | None = None


@runtime_checkable
class LimitedEncoder(Protocol):
    """A text encoder whose length can be set."""

    def with_max_tokens(self, max_tokens: int) -> Self:
        """The same encoder, reading at most so many tokens."""
        ...


@runtime_checkable
class SkippingEncoder(Protocol):
    """A text encoder that can be read at an earlier layer."""

    def with_clip_skip(self, clip_skip: int) -> Self:
        """The same encoder, read so many layers earlier. ValueError where it has not so many."""
        ...


@runtime_checkable
class StoredEncoder(Protocol):
    """A text encoder whose weights may stay in their files, where each call reads them."""

    def resident(self) -> "TextEncoder":
        """The same encoder with its weights in memory."""
        ...


@runtime_checkable
class TextEncoder(Protocol):
    """From prompts to states. Row i depends on prompt i alone."""

    def __call__(self, prompts: Sequence[str]) -> EncodedText:
        """States of the prompts, one row each, padded at the end.

        Raises:
            ValueError: no prompts.
        """
        ...


def resident_encoders(encoders: Mapping[str, TextEncoder]) -> dict[str, TextEncoder]:
    """The encoders with their weights in memory, to be called several times."""
    return {role: each.resident() if isinstance(each, StoredEncoder) else each for role, each in encoders.items()}
