"""PyTorch's scaled_dot_product_attention.

On a CPU torch computes all scores of a causal mask and hides half of them; a part of the queries at a time, each with
the keys up to its last, leaves most of those out.

Legend: B rows, H query heads, Hkv key/value heads, L queries, Lk keys, Dh width of a head.
"""

import torch
from torch import Tensor
from torch.nn import functional

from .base import AttentionCall

_PART = 128  # queries
_LONG = 256  # queries; below, parts cost more than they save


class SDPAAttention:
    """torch's own fused kernels (flash on the CPU; flash, efficient or cuDNN on CUDA)."""

    name = "sdpa"

    def refuses(self, call: AttentionCall) -> str | None:
        """Never: torch falls back by itself."""
        return None

    def __call__(self, call: AttentionCall) -> Tensor:
        """[B, H, L, Dh]."""
        heads, kv_heads, num_queries = call.queries.shape[1], call.keys.shape[1], call.queries.shape[2]
        if num_queries == 1 and heads != kv_heads:
            return _one_query(call, kv_heads)
        num_keys = call.keys.shape[2]
        if _pays_by_parts(call):
            return _causal_by_parts(call)
        # torch counts a causal mask from the first key, so only a square one means what we mean
        plainly_causal = num_queries == num_keys and call.mask.is_causal_at_end(num_queries, num_keys)
        return functional.scaled_dot_product_attention(
            call.queries,
            call.keys,
            call.values,
            attn_mask=None if plainly_causal else _bias(call),
            is_causal=plainly_causal,
            scale=call.scale,
            enable_gqa=heads != kv_heads,
        )


def _one_query(call: AttentionCall, kv_heads: int) -> Tensor:
    """Query heads that share keys stand as queries of one head, since torch would copy the keys for each of them."""
    rows, heads, _, width = call.queries.shape
    out = functional.scaled_dot_product_attention(
        call.queries.reshape(rows, kv_heads, heads // kv_heads, width),
        call.keys,
        call.values,
        attn_mask=_bias(call),
        scale=call.scale,
    )
    return out.reshape(rows, heads, 1, width)


def _pays_by_parts(call: AttentionCall) -> bool:
    num_queries = call.queries.shape[2]
    if num_queries < _LONG or not call.queries.is_cpu or torch.is_grad_enabled():
        return False
    return call.mask.is_causal_at_end(num_queries, call.keys.shape[2])


def _causal_by_parts(call: AttentionCall) -> Tensor:
    """The queries stand at the last of the keys."""
    (rows, heads, num_queries, _), (num_keys, width) = call.queries.shape, call.values.shape[2:]
    hidden = torch.ones(_PART, _PART, dtype=torch.bool, device=call.queries.device).triu(1)
    bias = call.queries.new_zeros(_PART, num_keys)
    bias[:, -_PART:].masked_fill_(hidden, -torch.inf)
    y = call.values.new_empty(rows, num_queries, heads, width).transpose(1, 2)
    for start in range(0, num_queries, _PART):
        count = min(_PART, num_queries - start)
        end = num_keys - num_queries + start + count
        y[:, :, start : start + count] = functional.scaled_dot_product_attention(
            call.queries[:, :, start : start + count],
            call.keys[:, :, :end],
            call.values[:, :, :end],
            attn_mask=bias[_PART - count :, num_keys - end :],
            scale=call.scale,
            enable_gqa=heads != call.keys.shape[1],
        )
    return y


def _bias(call: AttentionCall) -> Tensor | None:
    """As torch would make it of a mask of booleans, but once for all blocks."""
    return call.mask.bias(call.queries.shape[2], call.keys.shape[2], call.queries.dtype, call.queries.device)
