"""How a time embedding acts on one sublayer of a block: in float32 where the sublayer's tensor or the embedding is.

Legend: B rows, L tokens, D width; every tensor is [B or 1, L or 1, D].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Modulation(Protocol):
    """Acts before a sublayer, on its normalised input, and after it, on its output."""

    def before(self, h: Tensor) -> Tensor:
        """The sublayer's input [B, L, D]."""
        ...

    def after(self, h: Tensor) -> Tensor:
        """What is added to the residual stream [B, L, D]."""
        ...


class Unmodulated:
    """The neutral modulation: language models, text refiners."""

    def before(self, h: Tensor) -> Tensor:
        """`h`."""
        return h

    def after(self, h: Tensor) -> Tensor:
        """`h`."""
        return h


@dataclass(frozen=True, kw_only=True)
class ScaleGate:
    """h (1 + scale) before, gate h after (no shift: Z-Image, plate)."""

    scale: Tensor
    gate: Tensor

    def before(self, h: Tensor) -> Tensor:
        """h (1 + scale)."""
        return h * (1 + _wide(self.scale, h))

    def after(self, h: Tensor) -> Tensor:
        """gate h."""
        return h * _wide(self.gate, h)


@dataclass(frozen=True, kw_only=True)
class ShiftScaleGate:
    """h (1 + scale) + shift before, gate h after (AdaLN-Zero, Peebles & Xie 2023)."""

    shift: Tensor
    scale: Tensor
    gate: Tensor

    def before(self, h: Tensor) -> Tensor:
        """h (1 + scale) + shift."""
        return torch.addcmul(_wide(self.shift, h), h, 1 + _wide(self.scale, h))

    def after(self, h: Tensor) -> Tensor:
        """gate h."""
        return h * _wide(self.gate, h)


@dataclass(frozen=True, kw_only=True)
class ShiftScale:
    """h (1 + scale) + shift: the modulation of what has no gate: an output layer, a context that is only read."""

    shift: Tensor
    scale: Tensor

    def before(self, h: Tensor) -> Tensor:
        """h (1 + scale) + shift."""
        return torch.addcmul(_wide(self.shift, h), h, 1 + _wide(self.scale, h))

    def after(self, h: Tensor) -> Tensor:
        """`h`."""
        return h


@dataclass(frozen=True, kw_only=True)
class Stretches:
    """Another modulation for each stretch of the tokens (tokens of different times): `parts[n]` acts on the next
    `lengths[n]` of the L tokens."""

    lengths: tuple[int, ...]
    parts: Sequence[Modulation]

    def before(self, h: Tensor) -> Tensor:
        """Each stretch as its part has it."""
        stretches = zip(self.parts, h.split(self.lengths, dim=1), strict=True)
        return torch.cat([part.before(stretch) for part, stretch in stretches], dim=1)

    def after(self, h: Tensor) -> Tensor:
        """Each stretch as its part has it."""
        stretches = zip(self.parts, h.split(self.lengths, dim=1), strict=True)
        return torch.cat([part.after(stretch) for part, stretch in stretches], dim=1)


def _wide(table: Tensor, h: Tensor) -> Tensor:
    """The table, in float32 where h is: 1 + scale is then not rounded to fewer bits."""
    return table.float() if h.dtype is torch.float32 else table
