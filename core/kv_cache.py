"""Keys and values kept from call to call, for models that go on from what they have read.

Legend: B rows, Hkv key/value heads, L new tokens, Dh width of a head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .attention.base import AttentionMask


class ContiguousKVCache:
    """One preallocated [B, Hkv, capacity, Dh] buffer of keys and one of values per block.

    Rows may hold different numbers of tokens. A step reads `mask()` and `positions(L)`, runs the blocks (each calls
    `update`), then tells by `advance` how many of the L new tokens were real in each row: the rest is padding at the
    end, which no real token sees and the next step overwrites. For inference: gradients do not flow through.
    """

    def __init__(
        self,
        *,
        layers: int,
        batch: int,
        kv_heads: int,
        head_width: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        sizes = {"layers": layers, "batch": batch, "kv_heads": kv_heads, "head_width": head_width, "capacity": capacity}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} is {size}; it must be at least 1")
        self.batch = batch
        self.capacity = capacity
        # zeros, so that no padding can bring a non-finite value into a masked product
        self._buffers = torch.zeros(layers, 2, batch, kv_heads, capacity, head_width, dtype=dtype, device=device)
        self._set_lengths([0] * batch)

    @property
    def lengths(self) -> Tensor:
        """The number of valid tokens in each row, [B] int64; a later `advance` makes a new tensor."""
        return self._lengths

    @property
    def bytes(self) -> int:
        """The size of the buffers."""
        return self._buffers.nbytes

    def mask(self) -> AttentionMask:
        """What the next tokens see: each row's valid tokens, and among the new ones those up to themselves."""
        first = self._counts[0]
        is_even = all(count == first for count in self._counts)
        return AttentionMask(causal=True, query_offset=first if is_even else self._lengths)

    def positions(self, num_new: int) -> Tensor:
        """The places of the next `num_new` tokens of each row, [B, num_new, 1] int64, for `rotary_table`."""
        return (self._lengths[:, None] + torch.arange(num_new, device=self._lengths.device))[..., None]

    def update(self, block: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write block `block`'s new keys and values [B, Hkv, L, Dh] after each row's valid ones.

        Returns views of all keys and values, [B, Hkv, longest row + L, Dh].

        Raises:
            ValueError: they do not fit the capacity, or differ from the buffers in shape or dtype.
        """
        self._check(keys, values)
        num_new = keys.shape[2]
        end = max(self._counts) + num_new
        buffer = self._buffers[block]
        for n, new in enumerate((keys, values)):
            self._write(buffer[n], new.detach())
        self._num_written = num_new
        return buffer[0, :, :, :end], buffer[1, :, :, :end]

    def advance(self, counts: Tensor | Sequence[int]) -> None:
        """Count the first `counts[b]` of row b's new tokens as valid.

        Raises:
            ValueError: the counts are not one per row, from 0 to the number of tokens that the last `update` wrote.
        """
        new = [int(count) for count in (counts.tolist() if isinstance(counts, Tensor) else counts)]
        if len(new) != self.batch:
            raise ValueError(f"{len(new)} counts for a cache of {self.batch} rows")
        if min(new) < 0 or max(new) > self._num_written:
            raise ValueError(f"counts are {new}; each must be from 0 to the {self._num_written} tokens just written")
        self._set_lengths([old + count for old, count in zip(self._counts, new, strict=True)])

    def reset(self) -> None:
        """Forget everything: as newly made."""
        self._buffers.zero_()
        self._set_lengths([0] * self.batch)

    def _set_lengths(self, counts: list[int]) -> None:
        self._counts = counts
        self._lengths = torch.tensor(counts, dtype=torch.int64, device=self._buffers.device)
        self._num_written = 0

    def _check(self, keys: Tensor, values: Tensor) -> None:
        _, _, batch, heads, _, width = self._buffers.shape
        num_new = keys.shape[2]
        expected = [batch, heads, num_new, width]
        for name, new in (("keys", keys), ("values", values)):
            if list(new.shape) != expected:
                raise ValueError(f"{name} are {list(new.shape)}; the cache takes {expected}")
            if new.dtype != self._buffers.dtype:
                raise ValueError(f"{name} are {new.dtype}; the cache keeps {self._buffers.dtype}")
        longest = max(self._counts)
        if longest + num_new > self.capacity:
            raise ValueError(f"{longest} cached + {num_new} new tokens exceed the cache's capacity of {self.capacity}")

    def _write(self, buffer: Tensor, new: Tensor) -> None:
        """`new` [B, Hkv, L, Dh] into `buffer` [B, Hkv, capacity, Dh]."""
        num_new = new.shape[2]
        if min(self._counts) == max(self._counts):
            buffer[:, :, self._counts[0] : self._counts[0] + num_new] = new
            return
        rows = torch.arange(self.batch, device=buffer.device)[:, None]
        buffer[rows, :, self.positions(num_new)[..., 0]] = new.transpose(1, 2)
