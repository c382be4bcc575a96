"""Attention as plain matrix products: the definition that the other backends are tested against."""

import torch
from torch import Tensor

from .base import AttentionCall


class ReferenceAttention:
    """softmax(scale q k^T) v with float32 scores; runs everywhere, and is differentiable."""

    name = "reference"

    def refuses(self, call: AttentionCall) -> str | None:
        """Never."""
        return None

    def __call__(self, call: AttentionCall) -> Tensor:
        """[B, H, L, Dh]."""
        queries, keys, values = call.queries, call.keys, call.values
        groups = queries.shape[1] // keys.shape[1]
        if groups > 1:
            keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
        scores = (queries * call.scale @ keys.transpose(-1, -2)).float()
        mask = call.mask.dense(queries.shape[2], keys.shape[2], queries.device)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return scores.softmax(-1).to(values.dtype) @ values
