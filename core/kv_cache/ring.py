"""The key/value cache of sliding-window layers: what no coming token will see is forgotten.

Legend: B rows, Hkv key/value heads, C tokens that a buffer has room for, Dh width of a head.
"""

import torch

from .base import check_sizes
from .rows import RowBuffers

_FIRST_SIZE = 64


class RingKVCache(RowBuffers):
    """Each row's last tokens: `window` - 1 of them and room for `chunk` new ones at least, whatever the length.

    A token sees itself and the `window` - 1 before it. The tokens lie in order, as attention kernels want them, and
    move to the front of the buffer when they reach its end: every `chunk` tokens, not at every step. A step may bring
    more than `chunk` tokens; the buffer is then larger until the next one.
    """

    def __init__(
        self,
        *,
        layers: int,
        batch: int,
        kv_heads: int,
        head_width: int,
        window: int,
        chunk: int = 256,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        check_sizes(window=window, chunk=chunk)
        super().__init__(
            layers=layers,
            batch=batch,
            kv_heads=kv_heads,
            head_width=head_width,
            size=min(_FIRST_SIZE, window - 1 + chunk),
            window=window,
            dtype=dtype,
            device=device,
        )
        self.window = window
        self.chunk = chunk

    def _make_room(self, num_new: int) -> None:
        limit = self.window - 1 + max(num_new, self.chunk)
        needed = max(self._held) + num_new
        if needed <= self._size <= limit:
            return
        if needed <= limit:
            self._resize(max(needed, min(limit, 2 * self._size)), self._held)
        else:
            kept = [min(held, self.window - 1) for held in self._held]
            self._resize(min(limit, max(max(kept) + num_new, 2 * self._size)), kept)
