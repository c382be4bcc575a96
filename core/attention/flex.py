"""PyTorch's FlexAttention: masks as block masks, so that blocks of keys that nobody sees cost nothing.

Legend: B rows, H query heads, L queries, Lk keys, Dh width of a head.
"""

from collections.abc import Callable
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .base import AttentionCall, AttentionMask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_Shape = tuple[int, int, int, torch.device]


class FlexAttention:
    """Compiled with Inductor on CUDA.

    On a CPU it runs unfused, to check results: each new kind of shape takes seconds to trace.
    """

    name = "flex"

    def __init__(self) -> None:
        self._masks: WeakKeyDictionary[AttentionMask, dict[_Shape, BlockMask]] = WeakKeyDictionary()

    def refuses(self, call: AttentionCall) -> str | None:
        """The first of: device, gradient, Triton, dtype, head width."""
        device, width = call.queries.device.type, call.queries.shape[-1]
        if device == "cpu":
            return "no gradients on a CPU" if call.needs_gradient else None
        if device != "cuda":
            return f"no {device.upper()} kernels"
        if not self._has_triton:
            return "Triton is not installed"
        if call.queries.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return f"{call.queries.dtype} is not supported; float16, bfloat16 and float32 are"
        return f"head width {width} is less than 16" if width < 16 else None

    def __call__(self, call: AttentionCall) -> Tensor:
        """[B, H, L, Dh]."""
        attend = self._unfused if call.queries.device.type == "cpu" else self._compiled
        return attend(
            call.queries,
            call.keys,
            call.values,
            block_mask=self._block_mask(call),
            scale=call.scale,
            enable_gqa=call.queries.shape[1] != call.keys.shape[1],
        )

    @cached_property
    def _has_triton(self) -> bool:
        return find_spec("triton") is not None

    @cached_property
    def _compiled(self) -> Callable[..., Tensor]:
        from torch.nn.attention.flex_attention import flex_attention

        return torch.compile(flex_attention)

    @cached_property
    def _unfused(self) -> Callable[..., Tensor]:
        from torch.nn.attention.flex_attention import flex_attention

        # Inductor needs minutes for its C++ here, and a call that is not compiled at all warns
        return torch.compile(flex_attention, backend="eager", dynamic=True)

    def _block_mask(self, call: AttentionCall) -> "BlockMask | None":
        if call.mask.is_full:
            return None
        kept = self._masks.setdefault(call.mask, {})
        shape = (call.queries.shape[0], call.queries.shape[2], call.keys.shape[2], call.queries.device)
        if shape not in kept:
            kept[shape] = _build(call.mask, *shape)
        return kept[shape]


def _build(mask: AttentionMask, rows: int, num_queries: int, num_keys: int, device: torch.device) -> "BlockMask":
    """One rule for every mask, since a second rule would be compiled a second time."""
    from torch.nn.attention.flex_attention import create_block_mask

    offset = mask.query_offset if mask.causal else num_keys
    offsets = (offset if isinstance(offset, Tensor) else torch.tensor(offset)).to(device).expand(rows)
    hidden = torch.full_like(offsets, -num_queries) if mask.window is None else offsets - mask.window
    lengths = (torch.tensor(num_keys) if mask.key_lengths is None else mask.key_lengths).to(device).expand(rows)

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query + offsets[b]) & (key > query + hidden[b]) & (key < lengths[b])

    return create_block_mask(seen, rows, None, num_queries, num_keys, device=device)
