"""What an attention backend is asked, and how one is chosen.

Legend: B rows, H query heads, Hkv key/value heads (H is a multiple), L queries, Lk keys, Dh width of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionMask:
    """Which keys each query sees. Conditions add up; without any, every query sees every key.

    `causal`: query n stands at place `query_offset` + n and sees the keys up to its own place. The offset is one
    number, or [B] int64 where rows differ (a ragged batch that continues from a cache). `window`, with `causal` only:
    of these, the last `window` keys (a query at place p sees the places over p - window). `key_lengths` [B] int64: row
    b sees its first `key_lengths[b]` keys. `grid`: queries and keys are the same tokens, first those of a clip of
    (frames, rows, columns), row by row, none of which is hidden, then others, if there are any. A query that sees no
    key at all gets zeros from every backend, never NaN. The tensors must not be changed afterwards.
    """

    causal: bool = False
    query_offset: int | Tensor = 0
    key_lengths: Tensor | None = None
    window: int | None = None
    grid: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        if self.window is not None and (self.window < 1 or not self.causal):
            raise ValueError(f"window is {self.window}; it must be at least 1, and the mask causal")
        if isinstance(self.query_offset, int) and self.query_offset < 0:
            raise ValueError(f"query_offset is {self.query_offset}; it must be at least 0")
        for name, value in (("query_offset", self.query_offset), ("key_lengths", self.key_lengths)):
            if isinstance(value, Tensor) and (value.dim() != 1 or value.dtype not in (torch.int32, torch.int64)):
                shape = list(value.shape)
                raise ValueError(f"{name} has shape {shape} and {value.dtype}; it must be [rows] of whole numbers")

    @property
    def is_full(self) -> bool:
        """Whether nothing is masked."""
        return not self.causal and self.key_lengths is None

    def is_causal_at_end(self, num_queries: int, num_keys: int) -> bool:
        """Whether this is the causal mask alone, with the queries standing at the last of the keys in every row."""
        if not self.causal or self.key_lengths is not None or self._has_effective_window(num_queries):
            return False
        return isinstance(self.query_offset, int) and self.query_offset + num_queries == num_keys

    def sees_all(self, num_queries: int, num_keys: int) -> bool:
        """Whether every query sees every key, as far as that is known without reading tensors."""
        if self.key_lengths is not None:
            return False
        if not self.causal:
            return True
        return self._every_query_is_past(num_keys) and not self._has_effective_window(num_queries)

    def dense(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor | None:
        """The mask as booleans (True: seen), [B or 1, 1, L or 1, Lk], or None where nothing is masked.

        It is kept for repeated calls.
        """
        if self.sees_all(num_queries, num_keys):
            return None
        key = (num_queries, num_keys, device)
        if key not in self._dense:
            self._dense[key] = self._build(num_queries, num_keys, device)
        return self._dense[key]

    def bias(self, num_queries: int, num_keys: int, scores: torch.dtype, device: torch.device) -> Tensor | None:
        """`dense` as what is added to scores of this dtype: 0 where a key is seen, else -inf."""
        mask = self.dense(num_queries, num_keys, device)
        if mask is None:
            return None
        key = (num_queries, num_keys, scores, device)
        if key not in self._biases:
            self._biases[key] = torch.zeros_like(mask, dtype=scores).masked_fill_(~mask, -torch.inf)
        return self._biases[key]

    @cached_property
    def _biases(self) -> dict[tuple[int, int, torch.dtype, torch.device], Tensor]:
        return {}

    @cached_property
    def _dense(self) -> dict[tuple[int, int, torch.device], Tensor | None]:
        return {}

    def _build(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor | None:
        keys = torch.arange(num_keys, device=device)
        mask: Tensor | None = None
        windowed = self._has_effective_window(num_queries)
        if self.causal and (windowed or not self._every_query_is_past(num_keys)):
            queries = (torch.arange(num_queries, device=device) + self._row_offsets(device))[..., None]
            mask = keys <= queries
            if self.window is not None and windowed:
                mask &= keys > queries - self.window
            mask = mask[:, None]
        if self.key_lengths is not None:
            in_row = (keys < self.key_lengths.to(device)[:, None])[:, None, None]
            mask = in_row if mask is None else mask & in_row
        return mask

    def _every_query_is_past(self, num_keys: int) -> bool:
        return isinstance(self.query_offset, int) and self.query_offset >= num_keys - 1

    def _has_effective_window(self, num_queries: int) -> bool:
        """Whether the window may hide a key from the last query."""
        if self.window is None:
            return False
        return isinstance(self.query_offset, Tensor) or self.query_offset + num_queries > self.window

    def _row_offsets(self, device: torch.device) -> Tensor:
        """[B or 1, 1]."""
        if isinstance(self.query_offset, int):
            return torch.full((1, 1), self.query_offset, device=device)
        return self.query_offset.to(device)[:, None]


FULL = AttentionMask()


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """Queries [B, H, L, Dh], keys and values [B, Hkv, Lk, Dh], what each query sees, and the factor on the scores."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    mask: AttentionMask = FULL
    scale: float

    @property
    def needs_gradient(self) -> bool:
        """Whether a backward pass may follow."""
        inputs = (self.queries, self.keys, self.values)
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)


class AttentionBackend(Protocol):
    """One implementation of attention."""

    @property
    def name(self) -> str:
        """The name a user asks for."""
        ...

    def refuses(self, call: AttentionCall) -> str | None:
        """Why this backend cannot run the call, in a few words, or None where it can."""
        ...

    def __call__(self, call: AttentionCall) -> Tensor:
        """softmax(scale q k^T, over the keys seen) v, [B, H, L, Dh] in the dtype of the values.

        Zeros for a query that sees no key.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class AttentionSelector:
    """Backends in order of preference."""

    backends: Sequence[AttentionBackend]

    def choose(self, call: AttentionCall) -> AttentionBackend:
        """The first backend that does not refuse.

        Raises:
            ValueError: every backend refuses; the message lists each reason.
        """
        for backend in self.backends:
            if backend.refuses(call) is None:
                return backend
        reasons = "; ".join(f"{name}: {why}" for name, why in self.refusals(call).items())
        raise ValueError(f"no attention backend can run this call ({reasons})")

    def refusals(self, call: AttentionCall) -> dict[str, str]:
        """Why each refusing backend refuses, by name."""
        answers = ((backend.name, backend.refuses(call)) for backend in self.backends)
        return {name: why for name, why in answers if why is not None}

    def __call__(self, call: AttentionCall) -> Tensor:
        """Attention by the chosen backend, [B, H, L, Dh]."""
        return self.choose(call)(call)
