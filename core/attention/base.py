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

    `causal`: query n (counted from `query_offset`) sees keys 0..n. `key_lengths` [B] int64: row b sees its first `key_lengths[b]` keys.
    """

    causal: bool = False
    query_offset: int = 0
    key_lengths: Tensor | None = None

    @property
    def is_full(self) -> bool:
        """Whether nothing is masked."""
        return not self.causal and self.key_lengths is None

    def dense(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor | None:
        """The mask as booleans (True: seen), [B or 1, 1, L or 1, Lk], or None where nothing is masked; kept for repeated calls."""
        key = (num_queries, num_keys, device)
        if key not in self._dense:
            self._dense[key] = self._build(num_queries, num_keys, device)
        return self._dense[key]

    @cached_property
    def _dense(self) -> dict[tuple[int, int, torch.device], Tensor | None]:
        return {}

    def _build(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor | None:
        keys = torch.arange(num_keys, device=device)
        mask: Tensor | None = None
        if self.causal:
            queries = torch.arange(num_queries, device=device) + self.query_offset
            mask = (keys[None] <= queries[:, None])[None, None]
        if self.key_lengths is not None:
            in_row = (keys[None] < self.key_lengths.to(device)[:, None])[:, None, None]
            mask = in_row if mask is None else mask & in_row
        return mask


FULL = AttentionMask()


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """Queries [B, H, L, Dh], keys and values [B, Hkv, Lk, Dh], what each query sees, and the factor on the scores."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    mask: AttentionMask
    scale: float


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
        """softmax(scale q k^T, over the keys seen) v, [B, H, L, Dh]."""
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
