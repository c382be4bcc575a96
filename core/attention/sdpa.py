"""PyTorch's scaled_dot_product_attention.

Legend: B rows, H query heads, Hkv key/value heads, L queries, Lk keys, Dh width of a head.
"""

from torch import Tensor
from torch.nn import functional

from .base import AttentionCall


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


def _bias(call: AttentionCall) -> Tensor | None:
    """As torch would make it of a mask of booleans, but once for all blocks."""
    return call.mask.bias(call.queries.shape[2], call.keys.shape[2], call.queries.dtype, call.queries.device)
