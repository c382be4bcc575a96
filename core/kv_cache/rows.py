"""Keys and values in one buffer per block, a stretch of it for each row: what the contiguous and ring caches share.

Legend: B rows, Hkv key/value heads, C tokens that a buffer has room for, L new tokens, Dh width of a head.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ..attention.base import AttentionMask
from .base import RowLengths, Step, check_new, check_sizes, plan_step


class RowBuffers(ABC):
    """Buffers [2, B, Hkv, C, Dh] of keys and values, one per block, of which row b uses the first `_held[b]` places."""

    def __init__(
        self,
        *,
        layers: int,
        batch: int,
        kv_heads: int,
        head_width: int,
        size: int,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        check_sizes(layers=layers, batch=batch, kv_heads=kv_heads, head_width=head_width)
        self._window = window
        # zeros, so that no padding can bring a non-finite value into a masked product
        shape = (2, batch, kv_heads, size, head_width)
        self._buffers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self._rows = RowLengths([0] * batch, self._buffers[0].device)
        self._held = [0] * batch
        self._step: Step | None = None

    @property
    def batch(self) -> int:
        """The number of rows, B."""
        return len(self._held)

    @property
    def lengths(self) -> Tensor:
        """The number of tokens that each row has read, [B] int64; a later `advance` makes a new tensor."""
        return self._rows.tensor

    @property
    def bytes(self) -> int:
        """The size of the buffers as they are now."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def positions(self, num_new: int) -> Tensor:
        """The places of the next `num_new` tokens of each row, [B, num_new, 1] int64, for `rotary_table`."""
        return self._rows.positions(num_new)

    def mask(self, block: int, num_new: int) -> AttentionMask:
        """What the next `num_new` tokens see among the keys that `update` gives back: the same in every block."""
        return self._plan(num_new).mask

    def update(self, block: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write block `block`'s new keys and values [B, Hkv, L, Dh] after each row's own.

        Returns views of all visible keys and values, [B, Hkv, Lk, Dh].

        Raises:
            ValueError: they do not fit, or differ from the buffers in shape or dtype.
        """
        _, batch, kv_heads, _, head_width = self._buffers[block].shape
        dtype = self._buffers[block].dtype
        check_new(keys, values, batch=batch, kv_heads=kv_heads, head_width=head_width, dtype=dtype)
        step = self._plan(keys.shape[2])
        buffer = self._buffers[block]  # which `_plan` may have made anew
        step.write(buffer, keys.detach(), values.detach())
        self._rows.num_written = step.num_new
        return step.visible(buffer)

    def advance(self, counts: Tensor | Sequence[int]) -> None:
        """Count the first `counts[b]` of row b's new tokens as read.

        Raises:
            ValueError: the counts are not one per row, from 0 to the number of tokens that the last `update` wrote.
        """
        new = self._rows.checked(counts)
        self._rows.add(new)
        self._held = [old + count for old, count in zip(self._held, new, strict=True)]
        self._step = None

    def reset(self) -> None:
        """Forget everything: as newly made."""
        for buffer in self._buffers:
            buffer.zero_()
        self._held = [0] * self.batch
        self._rows.set(self._held)
        self._step = None

    @abstractmethod
    def _make_room(self, num_new: int) -> None:
        """Let each row's stretch take `num_new` more tokens, or raise ValueError."""

    def _plan(self, num_new: int) -> Step:
        if self._step is None or self._step.num_new != num_new:
            self._make_room(num_new)
            self._step = plan_step(self._held, num_new, self._window, self._rows.device)
        return self._step

    @property
    def _size(self) -> int:
        """C."""
        return self._buffers[0].shape[3]

    def _resize(self, size: int, kept: Sequence[int]) -> None:
        """New buffers for `size` tokens, with the last `kept[b]` of row b; one block after the other."""
        for i, old in enumerate(self._buffers):
            new = old.new_zeros((*old.shape[:3], size, old.shape[4]))
            for b, (held, keep) in enumerate(zip(self._held, kept, strict=True)):
                new[:, b, :, :keep] = old[:, b, :, held - keep : held]
            self._buffers[i] = new
        self._held = list(kept)
