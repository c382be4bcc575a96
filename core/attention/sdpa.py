"""PyTorch's scaled_dot_product_attention."""

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
        num_queries, num_keys = call.queries.shape[2], call.keys.shape[2]
        # torch counts a causal mask from the first key, so only a square one means what we mean
        plainly_causal = num_queries == num_keys and call.mask.is_causal_at_end(num_queries, num_keys)
        return functional.scaled_dot_product_attention(
            call.queries,
            call.keys,
            call.values,
            attn_mask=None if plainly_causal else call.mask.dense(num_queries, num_keys, call.queries.device),
            is_causal=plainly_causal,
            scale=call.scale,
            enable_gqa=call.queries.shape[1] != call.keys.shape[1],
        )
