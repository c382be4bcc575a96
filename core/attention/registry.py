"""The attention backends, and which one a call gets."""

import torch

from .approximate import BlockedAttention, SlidingTileAttention
from .base import FULL, AttentionBackend, AttentionCall, AttentionSelector
from .flash_attn import FlashAttention
from .flex import FlexAttention
from .one_query import OneQueryAttention
from .reference import ReferenceAttention
from .sdpa import SDPAAttention
from .xformers import XFormersAttention

_PREFERENCE = ("one_query", "flash_attn", "xformers", "sdpa", "flex", "reference")


def all_backends() -> tuple[AttentionBackend, ...]:
    """Every backend, installed or not, the plain definition first."""
    return (
        ReferenceAttention(),
        SDPAAttention(),
        FlexAttention(),
        FlashAttention(),
        XFormersAttention(),
        OneQueryAttention(),
    )


def approximations() -> tuple[AttentionBackend, ...]:
    """Those that are only chosen by name."""
    return SlidingTileAttention(), BlockedAttention()


def attention_selector(wanted: str | AttentionBackend | None = None) -> AttentionSelector:
    """The backends in order of preference (None), or the named one alone, whose refusal is then an error. An
    approximation, by its name or as a backend of one's own, has the exact ones behind it.

    Raises:
        ValueError: no backend has this name.
    """
    backends = {backend.name: backend for backend in all_backends()}
    preferred = tuple(backends[name] for name in _PREFERENCE)
    if wanted is None:
        return AttentionSelector(backends=preferred)
    if not isinstance(wanted, str):
        return AttentionSelector(backends=(wanted, *preferred))
    if wanted in backends:
        return AttentionSelector(backends=(backends[wanted],))
    inexact = {backend.name: backend for backend in approximations()}
    if wanted in inexact:
        return AttentionSelector(backends=(inexact[wanted], *preferred))
    raise ValueError(f"attention is {wanted!r}; it must be one of {', '.join((*backends, *inexact))}")


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
