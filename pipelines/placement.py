"""Copies of components on another device or in another dtype, which leave the originals alone."""

import copy
import dataclasses
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

C = TypeVar("C")


def moved(component: C, device: torch.device, dtype: torch.dtype) -> C:
    """A copy whose floating-point tensors are on `device` in `dtype`, others on `device`. What need not change is
    shared.

    Modules are copied with their tensors converted one by one, so at most one tensor is held twice beyond the result;
    in dataclasses every field is moved; anything else is returned as it is.
    """
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


def dtype_named(dtype: str | torch.dtype) -> torch.dtype:
    """A dtype that weights can be computed in, by itself or by its name.

    Raises:
        ValueError: none of float32, bfloat16, float16.
    """
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    name = str(dtype).removeprefix("torch.")
    if name not in known:
        raise ValueError(f"dtype is {name}; it must be one of {', '.join(known)}")
    return known[name]


def device_named(device: str | torch.device) -> torch.device:
    """A device that is there, by itself or by its name.

    Raises:
        ValueError: not the name of a device, or one that this machine does not have.
    """
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device is {str(device)!r}, which cannot be used: {reason}") from None
    if place.type == "meta":
        raise ValueError("device is 'meta', which holds no values; it must be one that computes, such as 'cpu'")
    return place


def _moved_module(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(
            _moved_tensor(parameter.detach(), device, dtype), requires_grad=parameter.requires_grad
        )
    for buffer in module.buffers():
        memo[id(buffer)] = _moved_tensor(buffer, device, dtype)
    return copy.deepcopy(module, memo)


def _moved_tensor(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else tensor.dtype)
