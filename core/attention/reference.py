"""Attention as plain matrix products: the definition that the other backends are tested against."""

import torch
from torch import Tensor

from .base import AttentionCall


class ReferenceAttention:
    """softmax(scale q k^T) v, computed in float32 (float64 for float64 inputs).

    It runs everywhere, and is differentiable.
    """

    name = "reference"

    def refuses(self, call: AttentionCall) -> str | None:
        """Never."""
        return None

    def __call__(self, call: AttentionCall) -> Tensor:
        """[B, H, L, Dh]."""
        dtype = torch.promote_types(call.values.dtype, torch.float32)
        queries, keys, values = (tensor.to(dtype) for tensor in (call.queries, call.keys, call.values))
        groups = queries.shape[1] // keys.shape[1]
        if groups > 1:
            keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
        scores = queries * call.scale @ keys.transpose(-1, -2)
        mask = call.mask.dense(queries.shape[2], keys.shape[2], queries.device)
        if mask is None:
            return (scores.softmax(-1) @ values).to(call.values.dtype)
        shares = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        sees_any = mask.any(-1, keepdim=True)
        return (shares.masked_fill(~sees_any, 0) @ values).to(call.values.dtype)
