"""The plain key/value cache: all tokens of a row, one after the other.

Legend: B rows, Hkv key/value heads, C tokens that a buffer has room for, Dh width of a head.
"""

import torch

from ..ops.kernels import TokenPlaces
from .base import check_sizes
from .rows import RowBuffers

_FIRST_SIZE = 1024


class ContiguousKVCache(RowBuffers):
    """One [B, Hkv, C, Dh] buffer of keys and one of values per block, for up to `capacity` tokens in each row.

    Buffers are made whole up to 1024 tokens, and grow by doubling beyond. With a `window`, a token sees itself and the
    `window` - 1 before it (all are kept: `RingKVCache` forgets those that no one sees).
    """

    def __init__(
        self,
        *,
        layers: int,
        batch: int,
        kv_heads: int,
        head_width: int,
        capacity: int,
        window: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        check_sizes(capacity=capacity, window=1 if window is None else window)
        super().__init__(
            layers=layers,
            batch=batch,
            kv_heads=kv_heads,
            head_width=head_width,
            size=min(capacity, _FIRST_SIZE),
            window=window,
            dtype=dtype,
            device=device,
        )
        self.capacity = capacity

    def place_token(self) -> TokenPlaces | None:
        """Make room for one token of each row, which `advance` then counts, and tell where it goes; None where some
        token does not see all that its row holds."""
        step = self._plan(1)
        if step.mask.window is not None or step.first or not self._buffers[0].is_cpu:
            return None
        self._rows.num_written = 1
        halves = [buffer.unbind() for buffer in self._buffers]
        rows = torch.arange(self.batch, device="cpu")[:, None]
        return TokenPlaces.of(halves, rows, self._rows.tensor + 1, head_axis=1)

    def _make_room(self, num_new: int) -> None:
        longest = max(self._held)
        if longest + num_new > self.capacity:
            raise ValueError(f"{longest} cached + {num_new} new tokens exceed the cache's capacity of {self.capacity}")
        if longest + num_new > self._size:
            self._resize(min(self.capacity, max(longest + num_new, 2 * self._size)), self._held)
