"""The paged key/value cache: rows whose keys and values lie in blocks of one pool.

Legend: B rows, Hkv key/value heads, L new tokens, Lk keys given back, S tokens in a block, T blocks read of each row,
Dh width of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention.base import AttentionMask
from ..ops.kernels import TokenPlaces
from .base import RowLengths, check_new, continuing_mask, first_visible
from .pool import PagedPool, PagedSequence


class PagedKVCache:
    """The rows are `sequences` of one pool; any of them may be put together anew for each step.

    `counts` says beforehand how many of the next step's tokens are real in each row, so that no blocks are taken for
    padding (default: all).
    """

    def __init__(self, sequences: Sequence[PagedSequence], *, counts: Sequence[int] | None = None) -> None:
        """
        Raises:
            ValueError: no sequences, sequences of several pools, one of them twice, or counts that are not one per row.
        """
        self._pool = _common_pool(sequences)
        if counts is not None and (len(counts) != len(sequences) or min(counts) < 0):
            raise ValueError(
                f"counts are {list(counts)} for {len(sequences)} rows; there must be one per row, 0 or more"
            )
        self._sequences = tuple(sequences)
        self._expected = None if counts is None else list(counts)
        self._rows = RowLengths([sequence.length for sequence in sequences], self._pool.buffers.device)
        self._step: _PagedStep | None = None

    @property
    def batch(self) -> int:
        """The number of rows, B."""
        return len(self._sequences)

    @property
    def lengths(self) -> Tensor:
        """The number of tokens that each row has read, [B] int64; a later `advance` makes a new tensor."""
        return self._rows.tensor

    @property
    def bytes(self) -> int:
        """The size of the pool."""
        return self._pool.bytes

    def positions(self, num_new: int) -> Tensor:
        """The places of the next `num_new` tokens of each row, [B, num_new, 1] int64, for `rotary_table`."""
        return self._rows.positions(num_new)

    def mask(self, block: int, num_new: int) -> AttentionMask:
        """What the next `num_new` tokens see among the keys that `update` gives back: the same in every block."""
        return self._plan(num_new).mask

    def update(self, block: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write block `block`'s new keys and values [B, Hkv, L, Dh] into the rows' blocks.

        Returns copies of all visible keys and values, [B, Hkv, Lk, Dh].

        Raises:
            ValueError: the pool has too few free blocks, or they differ from it in shape or dtype.
        """
        kv_heads, head_width = self._pool.buffers.shape[-2:]
        dtype = self._pool.buffers.dtype
        check_new(keys, values, batch=self.batch, kv_heads=kv_heads, head_width=head_width, dtype=dtype)
        step = self._plan(keys.shape[2])
        buffers = self._pool.buffers[block]  # [2, blocks, S, Hkv, Dh]
        new = torch.stack((keys.detach(), values.detach())).transpose(2, 3)
        buffers.flatten(1, 2).index_copy_(1, step.slots, new.reshape(2, -1, kv_heads, head_width))
        self._rows.num_written = step.num_new
        read = buffers.index_select(1, step.table).view(2, self.batch, -1, kv_heads, head_width)
        visible = read.narrow(2, step.first, step.end - step.first).transpose(2, 3)
        return visible[0], visible[1]

    def place_token(self) -> TokenPlaces | None:
        """Make room for one token of each row, which `advance` then counts, and tell where it goes; None where some
        row takes none, or does not see all that it has read."""
        pool = self._pool
        if pool.window is not None or not pool.buffers.is_cpu or any(count != 1 for count in self._expected or ()):
            return None
        self._plan(1)
        self._rows.num_written = 1
        longest = max(len(sequence.blocks) for sequence in self._sequences)
        blocks = [[*each.blocks, *[pool.zero_block] * (longest - len(each.blocks))] for each in self._sequences]
        halves = [buffer.unbind() for buffer in pool.buffers]
        return TokenPlaces.of(halves, torch.tensor(blocks, device="cpu"), self._rows.tensor + 1, head_axis=2)

    def advance(self, counts: Tensor | Sequence[int]) -> None:
        """Count the first `counts[b]` of row b's new tokens as read.

        Raises:
            ValueError: the counts are not one per row, from 0 to the number of tokens that the last `update` wrote, or
                more than were announced.
        """
        new = self._rows.checked(counts)
        if self._expected is not None and any(n > most for n, most in zip(new, self._expected, strict=True)):
            raise ValueError(f"counts are {new}; at most {self._expected} were announced")
        for sequence, count in zip(self._sequences, new, strict=True):
            sequence.advance(count)
        self._rows.add(new)
        self._expected = self._step = None

    def _plan(self, num_new: int) -> "_PagedStep":
        if self._step is None or self._step.num_new != num_new:
            most = self._expected or [num_new] * self.batch
            counts = [min(count, num_new) for count in most]
            for sequence, count in zip(self._sequences, counts, strict=True):
                sequence.reserve(count)
            self._step = _plan_paged(self._pool, self._sequences, counts, num_new)
        return self._step


@dataclass(frozen=True, kw_only=True)
class _PagedStep:
    """`slots` [B * L]: where the new tokens go, counted over all blocks' tokens. `table` [B * T]: the blocks to read,
    of which keys `first` to `end` are given back; `mask` counts from `first`.
    """

    num_new: int
    slots: Tensor
    table: Tensor
    first: int
    end: int
    mask: AttentionMask


def _plan_paged(pool: PagedPool, sequences: Sequence[PagedSequence], counts: Sequence[int], num_new: int) -> _PagedStep:
    size, device = pool.block_size, pool.buffers.device
    starts = [first_visible([sequence.length], pool.window) // size for sequence in sequences]
    offsets = [sequence.length - start * size for sequence, start in zip(sequences, starts, strict=True)]
    first = first_visible(offsets, pool.window)
    end = max(1, *(offset + count for offset, count in zip(offsets, counts, strict=True)))
    width = -(-end // size)
    table: list[int] = []
    slots: list[int] = []
    for sequence, start, count in zip(sequences, starts, counts, strict=True):
        row = sequence.blocks[start : start + width]
        table += row + [pool.zero_block] * (width - len(row))
        places = range(sequence.length, sequence.length + count)
        slots += [sequence.blocks[place // size] * size + place % size for place in places]
        slots += [pool.spare_block * size] * (num_new - count)
    return _PagedStep(
        num_new=num_new,
        slots=torch.tensor(slots, device=device),
        table=torch.tensor(table, device=device),
        first=first,
        end=end,
        mask=continuing_mask([offset - first for offset in offsets], num_new, pool.window, device),
    )


def _common_pool(sequences: Sequence[PagedSequence]) -> PagedPool:
    if not sequences:
        raise ValueError("no sequences; a cache needs at least one")
    if len({id(sequence) for sequence in sequences}) != len(sequences):
        raise ValueError("a sequence comes twice among the rows")
    if any(sequence.pool is not sequences[0].pool for sequence in sequences):
        raise ValueError("the sequences are of several pools; the rows of one cache share one")
    return sequences[0].pool
