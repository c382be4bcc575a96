"""Pictures that a user gives, as tensors.

Legend: K pictures, H W pixels.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from .files import open_image

if TYPE_CHECKING:
    from PIL.Image import Image

    from .arguments import Pictures


def read_pictures(pictures: "Pictures") -> Tensor:
    """Pixels [K, 3, 1, H, W] in -1..1, float32 on the CPU; transparent pixels over white.

    Raises:
        ValueError: not pictures, values out of range or not finite, or pictures of different sizes. FileNotFoundError:
        no such file.
    """
    rows = [_colours(unit) for item in _items(pictures) for unit in _unit(item, "image")]
    return (_stack(rows, "image") * 2 - 1)[:, :, None]


def read_masks(pictures: "Pictures") -> Tensor:
    """Masks [K, 1, 1, H, W], true where the picture is over a half. Same errors as `read_pictures`."""
    rows = [unit.mean(0, keepdim=True) for item in _items(pictures) for unit in _unit(item, "mask_image", grey=True)]
    return (_stack(rows, "mask_image") > 0.5)[:, :, None]


def spread(rows: Tensor, name: str, num_prompts: int, num_images_per_prompt: int) -> tuple[int, ...]:
    """Which of K `rows` belongs to each of the N pictures: one for all, one per prompt, or one per picture."""
    count, total = rows.shape[0], num_prompts * num_images_per_prompt
    if count == 1:
        return (0,) * total
    if count == num_prompts:
        return tuple(prompt for prompt in range(num_prompts) for _ in range(num_images_per_prompt))
    if count == total:
        return tuple(range(total))
    raise ValueError(
        f"{name} holds {count} pictures for {num_prompts} prompts of {num_images_per_prompt} pictures each; "
        "it takes one for all, one per prompt, or one per picture"
    )


def size_text(pixels: Tensor) -> str:
    """ "width x height" of pixels [..., H, W]."""
    return f"{pixels.shape[-1]}x{pixels.shape[-2]}"


def _items(pictures: object) -> Sequence[object]:
    if not isinstance(pictures, list | tuple):
        return (pictures,)
    if not pictures:
        raise ValueError("an empty list of pictures was given; it takes at least one")
    return cast(Sequence[object], pictures)


def _unit(picture: object, name: str, *, grey: bool = False) -> Sequence[Tensor]:
    """One picture (or a batch in one array) as tensors [channels, H, W] in 0..1."""
    import numpy
    from PIL.Image import Image

    if isinstance(picture, str | Path):
        return (_from_pil(open_image(picture), name, grey),)
    if isinstance(picture, Image):
        return (_from_pil(picture, name, grey),)
    if isinstance(picture, numpy.ndarray):
        if picture.dtype.kind not in "buif":
            raise ValueError(f"{name} is an array of {picture.dtype}; it must hold numbers")
        array = torch.from_numpy(numpy.array(picture, order="C"))  # a copy: the picture may be read-only
        layout = array[..., None] if array.ndim == 2 else array
        return _from_tensor(layout.movedim(-1, -3), name, "[H, W, 3]", grey)
    if isinstance(picture, Tensor):
        return _from_tensor(picture[None] if picture.ndim == 2 else picture, name, "[3, H, W]", grey)
    kind = type(picture).__name__
    raise ValueError(f"{name} is of type {kind}; it must be a PIL picture, an array, a tensor, or the path of a file")


def _from_pil(image: "Image", name: str, grey: bool) -> Tensor:
    import numpy
    from PIL import Image, ImageOps

    if image.mode.startswith(("I", "F")):  # Pillow would cut off everything over 255
        raise ValueError(f"{name} has more than 8 bits a channel (mode {image.mode}); convert it to 8 bits first")
    image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        layers = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(layers, image.convert("RGBA"))
    array = numpy.array(image.convert("L" if grey else "RGB"))
    tensor = torch.from_numpy(array).float() / 255
    return tensor[None] if grey else tensor.permute(2, 0, 1)


def _from_tensor(tensor: Tensor, name: str, layout: str, grey: bool) -> Sequence[Tensor]:
    channels = (1, 3) if grey else (3,)
    if tensor.ndim not in (3, 4) or tensor.shape[-3] not in channels:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {layout} or a batch of such")
    if tensor.is_complex() or tensor.is_meta:
        raise ValueError(f"{name} is a tensor of {tensor.dtype} on {tensor.device}; it must hold numbers from 0 to 1")
    unit = tensor.detach().cpu()
    if unit.dtype is torch.uint8:
        unit = unit.float() / 255
    unit = unit.float()
    if not bool(((unit >= 0) & (unit <= 1)).all()):
        low, high = float(unit.min()), float(unit.max())
        raise ValueError(f"{name} has values from {low:g} to {high:g}; floats must be from 0 to 1")
    return tuple(unit) if unit.ndim == 4 else (unit,)


def _colours(unit: Tensor) -> Tensor:
    return unit.expand(3, -1, -1)


def _stack(rows: Sequence[Tensor], name: str) -> Tensor:
    sizes = sorted({size_text(row) for row in rows})
    if len(sizes) > 1:
        raise ValueError(f"{name} holds pictures of sizes {' and '.join(sizes)}; they must be of one size")
    return torch.stack(list(rows))
