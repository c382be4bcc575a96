"""What a key/value cache is, and what its kinds share.

Legend: B rows, Hkv key/value heads, L new tokens of each row, Lk keys given back, Dh width of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from ..attention.base import AttentionMask


class KVCache(Protocol):
    """Keys and values of B rows of tokens, kept from call to call. Rows may hold different numbers of tokens.

    A step reads `positions(L)` and `mask(block, L)`, runs the blocks (each calls `update`), then tells by `advance` how
    many of the L new tokens were real in each row: the rest is padding at the end, which no real token sees and which
    is not kept. Nothing counts before `advance`: a step that failed can be run again. For inference: gradients do not
    flow through.
    """

    @property
    def batch(self) -> int:
        """The number of rows, B."""
        ...

    @property
    def lengths(self) -> Tensor:
        """The number of tokens that each row has read, [B] int64; a later `advance` makes a new tensor."""
        ...

    @property
    def bytes(self) -> int:
        """The size of the buffers as they are now."""
        ...

    def positions(self, num_new: int) -> Tensor:
        """The places of the next `num_new` tokens of each row, [B, num_new, 1] int64, for `rotary_table`."""
        ...

    def mask(self, block: int, num_new: int) -> AttentionMask:
        """What the next `num_new` tokens of each row see among the keys that `update(block, ...)` will give back.

        One object for all blocks that see alike, so that what backends derive from it is made once per step.
        """
        ...

    def update(self, block: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take block `block`'s new keys and values [B, Hkv, L, Dh]; give all visible ones, [B, Hkv, Lk, Dh].

        Raises:
            ValueError: they do not fit, or differ from the cache in shape or dtype.
        """
        ...

    def advance(self, counts: Tensor | Sequence[int]) -> None:
        """Count the first `counts[b]` of row b's new tokens as read.

        Raises:
            ValueError: the counts are not one per row, from 0 to the number of tokens that the last `update` wrote.
        """
        ...


class RowLengths:
    """How many tokens each row has read: `counts` on the host, `tensor` [B] int64 on the cache's device.

    `num_written` is the number of tokens per row written since they last changed.
    """

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        self.device = device
        self.set(counts)

    def set(self, counts: Sequence[int]) -> None:
        """Begin anew from `counts`."""
        self.counts = list(counts)
        self.tensor = torch.tensor(self.counts, dtype=torch.int64, device=self.device)
        self.num_written = 0

    def positions(self, num_new: int) -> Tensor:
        """[B, num_new, 1] int64."""
        return (self.tensor[:, None] + torch.arange(num_new, device=self.device))[..., None]

    def checked(self, counts: Tensor | Sequence[int]) -> list[int]:
        """`counts` as numbers, if `advance` may take them."""
        new = [int(count) for count in (counts.tolist() if isinstance(counts, Tensor) else counts)]
        if len(new) != len(self.counts):
            raise ValueError(f"{len(new)} counts for a cache of {len(self.counts)} rows")
        if min(new) < 0 or max(new) > self.num_written:
            raise ValueError(f"counts are {new}; each must be from 0 to the {self.num_written} tokens just written")
        return new

    def add(self, new: Sequence[int]) -> None:
        """Count `new[b]` more tokens in row b."""
        self.set([old + count for old, count in zip(self.counts, new, strict=True)])


@dataclass(frozen=True, kw_only=True)
class Step:
    """Where one step's new tokens go in buffers [B, Hkv, C, Dh], and which keys they see, and how.

    `at` is the place of the first new token in every row, or the places of all [B, L] where rows differ. Keys
    `first` to `end` are given back, and `mask` counts from `first`.
    """

    num_new: int
    at: int | Tensor
    first: int
    end: int
    mask: AttentionMask

    def write(self, buffer: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put new keys and values [B, Hkv, L, Dh] into `buffer` [2, B, Hkv, C, Dh]."""
        if isinstance(self.at, int):
            key_places, value_places = buffer.narrow(3, self.at, self.num_new).unbind()
            key_places.copy_(keys)
            value_places.copy_(values)
            return
        rows = torch.arange(len(keys), device=buffer.device)[:, None]
        for half, new in zip(buffer, (keys, values), strict=True):
            half[rows, :, self.at] = new.transpose(1, 2)

    def visible(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Views of `buffer` [2, B, Hkv, C, Dh]: keys and values [B, Hkv, Lk, Dh]."""
        keys, values = buffer.narrow(3, self.first, self.end - self.first).unbind()
        return keys, values


def plan_step(held: Sequence[int], num_new: int, window: int | None, device: torch.device) -> Step:
    """The step after which row b's buffer holds `held[b]` + `num_new` tokens."""
    first, end = first_visible(held, window), max(held) + num_new
    at: int | Tensor = held[0]
    if not is_even(held):
        at = torch.tensor(held, device=device)[:, None] + torch.arange(num_new, device=device)
    mask = continuing_mask([count - first for count in held], num_new, window, device)
    return Step(num_new=num_new, at=at, first=first, end=end, mask=mask)


def first_visible(held: Sequence[int], window: int | None) -> int:
    """How many of the first keys no row's next token sees, where row b holds `held[b]` keys."""
    return 0 if window is None else max(0, min(held) + 1 - window)


def continuing_mask(offsets: Sequence[int], num_new: int, window: int | None, device: torch.device) -> AttentionMask:
    """The causal mask of `num_new` tokens, row b's first of which stands at key `offsets[b]`; it says no more than it
    must, so that backends need no mask tensor where all keys are seen.
    """
    hides = window is not None and max(offsets) + num_new > window
    if is_even(offsets):
        return AttentionMask(causal=True, query_offset=offsets[0], window=window if hides else None)
    places = torch.tensor(offsets, dtype=torch.int64, device=device)
    return AttentionMask(causal=True, query_offset=places, window=window if hides else None)


def is_even(counts: Sequence[int]) -> bool:
    """Whether all rows have the same count."""
    return all(count == counts[0] for count in counts)


def check_sizes(**sizes: int) -> None:
    """Refuse sizes below 1, and what is no size, by name."""
    for name, size in sizes.items():
        if not isinstance(cast(object, size), int):
            raise ValueError(f"{name} is {size!r}; it must be a whole number")
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")


def check_new(keys: Tensor, values: Tensor, *, batch: int, kv_heads: int, head_width: int, dtype: torch.dtype) -> None:
    """Refuse new keys and values that are not [B, Hkv, L, Dh] of the cache's dtype."""
    expected = (batch, kv_heads, keys.shape[2], head_width)
    for name, new in (("keys", keys), ("values", values)):
        if new.shape != expected:
            raise ValueError(f"{name} are {list(new.shape)}; the cache takes {list(expected)}")
        if new.dtype != dtype:
            raise ValueError(f"{name} are {new.dtype}; the cache keeps {dtype}")
