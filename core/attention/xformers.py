"""The xformers package's memory-efficient attention, where installed.

Legend: B rows, H query heads, L queries, Lk keys, Dh width of a head.
"""

from functools import cached_property
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from .base import AttentionCall


class XFormersAttention:
    """memory_efficient_attention on CUDA: no key lengths, and no offset but that of the last queries."""

    name = "xformers"

    def refuses(self, call: AttentionCall) -> str | None:
        """The first of: device, package, dtype, head width, mask."""
        device, width, mask = call.queries.device, call.queries.shape[-1], call.mask
        if device.type != "cuda":
            return f"no {device.type.upper()} kernels"
        if not self._is_installed:
            return "not installed (pip install xformers)"
        if call.queries.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return f"{call.queries.dtype} is not supported; float16, bfloat16 and float32 are"
        if width % 8:
            return f"head width {width} is not a multiple of 8"
        if mask.key_lengths is not None:
            return "key lengths are not supported"
        if mask.window is not None and not mask.is_causal_at_end(call.queries.shape[2], call.keys.shape[2]):
            return "a sliding window is not supported"
        if mask.causal and not mask.is_causal_at_end(call.queries.shape[2], call.keys.shape[2]):
            return "a causal offset is supported only where the queries are the last of the keys, alike in all rows"
        return None

    def __call__(self, call: AttentionCall) -> Tensor:
        """[B, H, L, Dh]."""
        attend = import_module("xformers.ops").memory_efficient_attention
        biases = import_module("xformers.ops.fmha.attn_bias")
        groups = call.queries.shape[1] // call.keys.shape[1]
        keys, values = (tensor.repeat_interleave(groups, dim=1) for tensor in (call.keys, call.values))
        queries, keys, values = (tensor.transpose(1, 2) for tensor in (call.queries, keys, values))
        bias = biases.LowerTriangularFromBottomRightMask() if call.mask.causal else None
        out: Tensor = attend(queries, keys, values, attn_bias=bias, scale=call.scale)
        return out.transpose(1, 2)

    @cached_property
    def _is_installed(self) -> bool:
        return find_spec("xformers") is not None
