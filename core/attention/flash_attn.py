"""The flash-attn package (Dao 2023), where installed.

Legend: B rows, H query heads, L queries, Lk keys, Dh width of a head.
"""

from functools import cached_property
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from .base import AttentionCall, AttentionMask


class FlashAttention:
    """flash-attn 2.1 or newer: half precision on CUDA.

    Key lengths only without gradients, and no causal offset but that of the last queries.
    """

    name = "flash_attn"

    def refuses(self, call: AttentionCall) -> str | None:
        """The first of: device, package, GPU generation, dtype, head width, mask, gradient."""
        device, width = call.queries.device, call.queries.shape[-1]
        if device.type != "cuda":
            return f"no {device.type.upper()} kernels"
        if not self._is_installed:
            return "not installed (pip install flash-attn)"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "the GPU is older than compute capability 8.0"
        if call.queries.dtype not in (torch.float16, torch.bfloat16):
            return f"{call.queries.dtype} is not supported; float16 and bfloat16 are"
        if width % 8 or width > 256:
            return f"head width {width} is not a multiple of 8 up to 256"
        return _refuses_mask(call)

    def __call__(self, call: AttentionCall) -> Tensor:
        """[B, H, L, Dh]."""
        package = import_module("flash_attn")
        queries, keys, values = (tensor.transpose(1, 2) for tensor in (call.queries, call.keys, call.values))
        lengths = call.mask.key_lengths
        if lengths is None:
            out: Tensor = package.flash_attn_func(
                queries, keys, values, softmax_scale=call.scale, causal=call.mask.causal
            )
        else:
            lengths = lengths.to(queries.device, torch.int32).clamp(max=keys.shape[1])
            out = package.flash_attn_with_kvcache(
                queries, keys, values, cache_seqlens=lengths, softmax_scale=call.scale
            )
        return out.transpose(1, 2)

    @cached_property
    def _is_installed(self) -> bool:
        return find_spec("flash_attn") is not None


def _refuses_mask(call: AttentionCall) -> str | None:
    mask: AttentionMask = call.mask
    if mask.is_full or mask.is_causal_at_end(call.queries.shape[2], call.keys.shape[2]):
        return None
    if mask.window is not None:
        return "a sliding window is not supported"
    if mask.causal and mask.key_lengths is not None:
        return "key lengths together with a causal mask are not supported"
    if mask.causal:
        return "a causal offset is supported only where the queries are the last of the keys, alike in all rows"
    return "key lengths are not supported with gradients" if call.needs_gradient else None
