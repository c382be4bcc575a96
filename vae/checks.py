"""What autoencoders make sure of before they compute.

Legend: B rows, F frames, H W pixels.
"""

from torch import Tensor

from .frames import check_frames


def check_pixels(pixels: Tensor, downsampling: int, group: int) -> None:
    """Refuse, with a ValueError, what is no clip [B, 3, F, H, W] of floating-point numbers, frames that are no whole
    number of groups after the first, and sides that are no multiple of the downsampling."""
    check_values("pixels", pixels, 3)
    for side, length in (("height", pixels.shape[3]), ("width", pixels.shape[4])):
        check_side(side, length, downsampling)
    check_frames(pixels.shape[2], group)


def check_values(name: str, x: Tensor, channels: int) -> None:
    """Refuse, with a ValueError, what is no volume of so many channels, or not of floating-point numbers."""
    check_volume(name, x, channels)
    check_floating(name, x)


def check_volume(name: str, x: Tensor, channels: int, *, frames: str = "frames") -> None:
    """Refuse, with a ValueError, what is no volume of so many channels; `frames`: how many, in words."""
    if x.ndim != 5 or x.shape[1] != channels or 0 in x.shape:
        raise ValueError(f"{name} have shape {list(x.shape)}; it must be [rows, {channels}, {frames}, height, width]")


def check_floating(name: str, x: Tensor) -> None:
    """Refuse, with a ValueError, what is not of floating-point numbers."""
    if not x.is_floating_point():
        raise ValueError(f"{name} are {x.dtype}; they must be floating-point numbers")


def check_side(side: str, length: int, multiple: int) -> None:
    """Refuse a side that is no multiple with a ValueError that names both neighbours."""
    if length % multiple:
        below = length // multiple * multiple
        nearest = f"{below + multiple}" if below == 0 else f"{below} or {below + multiple}"
        raise ValueError(f"the {side} is {length} pixels; it must be a multiple of {multiple}, such as {nearest}")
