"""Copies of components on another device or in another dtype, which leave the originals alone."""

import copy
import dataclasses
from typing import Any, Protocol, Self, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor, nn

C = TypeVar("C")


@runtime_checkable
class Movable(Protocol):
    """A component that knows how it is copied: which of its weights must stay wide."""

    def moved(self, device: torch.device, dtype: torch.dtype | None) -> Self:
        """A copy, as by the function `moved`."""
        ...


def moved(component: C, device: torch.device, dtype: torch.dtype | None) -> C:
    """A copy whose floating-point tensors are on `device` in `dtype` (None: each in its own), others on `device`. What
    need not change is shared.

    Modules are copied with their tensors converted one by one, so at most one tensor is held twice beyond the result;
    in dataclasses every field is moved; anything else is returned as it is.
    """
    if isinstance(component, Movable) and not isinstance(component, type):
        return cast(C, component.moved(device, dtype))
    if isinstance(component, nn.Module):
        return cast(C, _moved_module(component, device, dtype))
    if isinstance(component, Tensor):
        return cast(C, _moved_tensor(component, device, dtype))
    if dataclasses.is_dataclass(component) and not isinstance(component, type):
        fields = {field.name: getattr(component, field.name) for field in dataclasses.fields(component) if field.init}
        copies = {name: moved(value, device, dtype) for name, value in fields.items()}
        changed = {name: value for name, value in copies.items() if value is not fields[name]}
        return cast(C, dataclasses.replace(cast(Any, component), **changed) if changed else component)
    return component


def _moved_module(module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(
            _moved_tensor(parameter.detach(), device, dtype), requires_grad=parameter.requires_grad
        )
    for buffer in module.buffers():
        memo[id(buffer)] = _moved_tensor(buffer, device, dtype)
    return copy.deepcopy(module, memo)


def _moved_tensor(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """Weights without values (on the meta device) stay without."""
    device = tensor.device if tensor.is_meta else device
    return tensor.to(device=device, dtype=dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)
