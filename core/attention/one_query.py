"""Our own kernel for one query a row and head, as in decoding: one pass over the keys, one over the values.

Legend: B rows, H query heads, Dh width of a head.
"""

import torch
from torch import Tensor

from ..ops import kernels
from .base import AttentionCall, AttentionMask


class OneQueryAttention:
    """On a CPU, without gradients; rows may see different numbers of keys."""

    name = "one_query"

    def refuses(self, call: AttentionCall) -> str | None:
        """The first of: more queries, kernel, device, dtype, gradients, layout, mask."""
        queries, keys, values = call.queries, call.keys, call.values
        if queries.shape[2] != 1:
            return f"{queries.shape[2]} queries; it takes one"
        if not kernels.IS_BUILT:
            return "not built (it needs a C compiler at installation, and AVX2)"
        if not queries.is_cpu:
            return f"no {queries.device.type.upper()} kernels"
        if keys.dtype not in (torch.float32, torch.bfloat16) or keys.dtype is not values.dtype:
            return f"{keys.dtype} is not supported; float32 and bfloat16 are"
        if not kernels.may_run_untracked(queries, keys, values):
            return "no gradients, compiling, tracing, autocast or tensors of other kinds"
        if keys.shape != values.shape or len(keys) != len(queries):
            return "keys and values of other sizes, or for other rows"
        if queries.shape[3] % 8:
            return f"head width {queries.shape[3]} is not a multiple of 8"
        if keys.stride(3) != 1 or values.stride(3) != 1:
            return "heads whose channels do not lie side by side"
        if call.mask.causal and call.mask.window is not None:
            return "a sliding window is not supported"
        return None

    def __call__(self, call: AttentionCall) -> Tensor:
        """[B, H, 1, Dh]."""
        sees_all = call.mask.sees_all(1, call.keys.shape[2])
        lengths = None if sees_all else seen_lengths(call.mask, len(call.queries), call.keys.shape[2])
        y = kernels.one_query(call.queries, call.keys, call.values, lengths, call.scale)
        return y if y.dtype is call.values.dtype else y.to(call.values.dtype)


def seen_lengths(mask: AttentionMask, rows: int, num_keys: int) -> Tensor | None:
    """How many of the first keys each row's only query sees, [B] int64 on the CPU; None where it sees all."""
    lengths = mask.key_lengths
    if mask.causal:
        offset = mask.query_offset
        past = offset + 1 if isinstance(offset, Tensor) else torch.full((rows,), offset + 1, device="cpu")
        lengths = past if lengths is None else torch.minimum(past.to(lengths.dtype), lengths)
    return None if lengths is None else lengths.long().clamp(0, num_keys).expand(rows).contiguous()
