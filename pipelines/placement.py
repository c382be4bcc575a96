"""Devices and dtypes by their names."""

import torch


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
        raise ValueError(
            f"device is {str(device)!r}, which cannot be used: {reason}; this machine has {', '.join(_present())}"
        ) from None
    if place.type == "meta":
        raise ValueError("device is 'meta', which holds no values; it must be one that computes, such as 'cpu'")
    return place


def _present() -> list[str]:
    """The names of this machine's devices."""
    found = torch.accelerator.current_accelerator(check_available=True)
    others = () if found is None else (f"{found.type}:{i}" for i in range(torch.accelerator.device_count()))
    return ["cpu", *others]
