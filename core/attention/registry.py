"""The attention backends, and which one a call gets."""

import torch

from .base import FULL, AttentionBackend, AttentionCall, AttentionSelector
from .flash_attn import FlashAttention
from .flex import FlexAttention
from .reference import ReferenceAttention
from .sdpa import SDPAAttention
from .xformers import XFormersAttention

_PREFERENCE = ("flash_attn", "xformers", "sdpa", "flex", "reference")


def all_backends() -> tuple[AttentionBackend, ...]:
    """Every backend, installed or not, the plain definition first."""
    return ReferenceAttention(), SDPAAttention(), FlexAttention(), FlashAttention(), XFormersAttention()


def attention_selector(name: str | None = None) -> AttentionSelector:
    """The backends in order of preference (None), or the named one alone, whose refusal is then an error.

    Raises:
        ValueError: no backend has this name.
    """
    backends = {backend.name: backend for backend in all_backends()}
    if name is None:
        return AttentionSelector(backends=tuple(backends[preferred] for preferred in _PREFERENCE))
    if name not in backends:
        raise ValueError(f"attention is {name!r}; it must be one of {', '.join(backends)}")
    return AttentionSelector(backends=(backends[name],))


def attention_report(device: torch.device | str, dtype: torch.dtype) -> dict[str, str | None]:
    """Why each backend refuses an ordinary call on a device in a dtype, by name; None where it runs.

    Ordinary: 8 heads of width 64, nothing masked, no gradients.

    Raises:
        ValueError: the device is not there.
    """
    try:
        x = torch.empty(1, 8, 64, 64, device=device, dtype=dtype)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"device {str(device)!r} is not available: {str(error).splitlines()[0]}") from error
    call = AttentionCall(queries=x, keys=x, values=x, mask=FULL, scale=0.125)
    return {backend.name: backend.refuses(call) for backend in all_backends()}
