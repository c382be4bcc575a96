"""Pictures that a user gives, as tensors.

Legend: K pictures, H W pixels.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor

from .files import as_shown, open_image
from .result import to_pil

if TYPE_CHECKING:
    from PIL.Image import Image

    from .arguments import Clips, PictureLists, Pictures

_G = TypeVar("_G")


def read_pictures(pictures: "Pictures | PictureLists") -> Tensor:
    """Pixels [K, 3, 1, H, W] in -1..1, float32 on the CPU; transparent pixels over white.

    Raises:
        ValueError: not pictures, values out of range or not finite, or pictures of different sizes. FileNotFoundError:
        no such file.
    """
    rows = [_colours(unit) for item in _items(pictures) for unit in _unit(item, "image")]
    return (stacked(rows, "image") * 2 - 1)[:, :, None]


def read_lists(pictures: "Pictures | PictureLists", name: str = "image") -> list[tuple[Tensor, ...]]:
    """Lists of pictures [3, H, W] in 0..1, float32 on the CPU, of any sizes: one list, or several where the argument
    holds lists. Same errors as `read_pictures`, and ValueError for lists beside pictures."""
    items = _items(pictures)
    nested = [isinstance(item, list | tuple) for item in items]
    if any(nested) and not all(nested):
        raise ValueError(f"{name} holds pictures and lists of pictures; it takes either, not both")
    lists = [_items(item) for item in items] if any(nested) else [items]
    return [tuple(_colours(unit) for item in each for unit in _unit(item, name)) for each in lists]


def read_videos(clips: "Clips") -> Tensor:
    """Clips [K, 3, F, H, W] in -1..1, float32 on the CPU. Same errors as `read_pictures`, and ValueError for clips of
    different lengths."""
    each = [stacked(frames, "video") for clip in _clips(clips) for frames in read_lists(clip, "video")]
    lengths = sorted({len(clip) for clip in each})
    if len(lengths) > 1:
        raise ValueError(f"video holds clips of {' and '.join(map(str, lengths))} frames; they must be of one length")
    return stacked([clip.transpose(0, 1) for clip in each], "video") * 2 - 1


def _clips(given: "Clips") -> "Sequence[Pictures]":
    """One clip or several, none of them a file, each as a batch or a list of frames."""
    import numpy

    arrays, lists = (Tensor, numpy.ndarray), (list, tuple)
    if isinstance(given, arrays):
        return [*given] if given.ndim == 5 else [given]  # pyright: ignore[reportReturnType]
    several = [isinstance(item, lists) or (isinstance(item, arrays) and item.ndim == 4) for item in _items(given)]
    if any(several) and not all(several):
        raise ValueError("video holds clips and frames of clips; it takes either, not both")
    return given if any(several) else [given]  # pyright: ignore[reportReturnType]


def opened(pictures: _G) -> _G:
    """The same, with the pictures of files in their place; whatever is no path stays as it is. Errors as for
    `open_image`."""
    if isinstance(pictures, str | Path):
        return cast(_G, open_image(pictures))
    if isinstance(pictures, list | tuple):
        return cast(_G, [opened(each) for each in cast(Sequence[object], pictures)])
    return pictures


def opened_clips(clips: _G) -> _G:
    """The same, with the frames of clips in place of their files, or of files of single frames. In a list, files are
    clips if one of them is. Errors as for `read_clip` and `open_image`."""
    from .clips import may_be_clip, read_clip

    if isinstance(clips, str | Path):
        return cast(_G, read_clip(clips).frames)
    if isinstance(clips, list | tuple):
        given = cast(Sequence[object], clips)
        files = [each for each in given if isinstance(each, str | Path)]
        if any(may_be_clip(file) for file in files):
            return cast(_G, [read_clip(each).frames if isinstance(each, str | Path) else each for each in given])
    return opened(clips)


def resized(picture: Tensor, width: int, height: int) -> Tensor:
    """A picture [3, H, W] in 0..1 at another size, by Lanczos on 8 bits as image processors do it."""
    from PIL.Image import Resampling

    (image,) = to_pil(picture[None])
    return _from_pil(image.resize((width, height), Resampling.LANCZOS), "image", grey=False)


def centre_crop(picture: Tensor, width: int, height: int) -> Tensor:
    """The middle of a picture [..., H, W]; an odd rest is left at the right and the bottom."""
    top, left = (picture.shape[-2] - height) // 2, (picture.shape[-1] - width) // 2
    return picture[..., top : top + height, left : left + width]


def read_masks(pictures: "Pictures") -> Tensor:
    """Masks [K, 1, 1, H, W], true where the picture is over a half. Same errors as `read_pictures`."""
    rows = [unit.mean(0, keepdim=True) for item in _items(pictures) for unit in _unit(item, "mask_image", grey=True)]
    return (stacked(rows, "mask_image") > 0.5)[:, :, None]


def spread(rows: Tensor, name: str, num_prompts: int, num_images_per_prompt: int) -> tuple[int, ...]:
    """Which of K `rows` belongs to each of the N pictures: one for all, one per prompt, or one per picture."""
    return spread_count(rows.shape[0], name, num_prompts, num_images_per_prompt)


def spread_count(count: int, name: str, num_prompts: int, num_images_per_prompt: int) -> tuple[int, ...]:
    """As `spread`, for `count` rows."""
    total = num_prompts * num_images_per_prompt
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
        order = numpy.float32 if picture.dtype.kind == "f" else picture.dtype.newbyteorder("=")
        array = torch.from_numpy(numpy.array(picture, order, order="C"))  # a copy: the picture may be read-only
        layout = array[..., None] if array.ndim == 2 else array
        return _from_tensor(layout.movedim(-1, -3), name, "[H, W, 3]", grey)
    if isinstance(picture, Tensor):
        return _from_tensor(picture[None] if picture.ndim == 2 else picture, name, "[3, H, W]", grey)
    kind = type(picture).__name__
    raise ValueError(f"{name} is of type {kind}; it must be a PIL picture, an array, a tensor, or the path of a file")


def _from_pil(image: "Image", name: str, grey: bool) -> Tensor:
    import numpy

    tensor = torch.from_numpy(numpy.array(as_shown(image, name, grey=grey))).float() / 255
    return tensor[None] if grey else tensor.permute(2, 0, 1)


def _from_tensor(tensor: Tensor, name: str, layout: str, grey: bool) -> Sequence[Tensor]:
    channels = (1, 3) if grey else (3,)
    if tensor.ndim not in (3, 4) or tensor.shape[-3] not in channels:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {layout} or a batch of such")
    if tensor.shape[0] == 0:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, which holds no picture; it takes at least one")
    if tensor.is_complex() or tensor.is_meta or tensor.layout is not torch.strided:
        raise ValueError(
            f"{name} is a tensor of {tensor.dtype} on {tensor.device}, {tensor.layout}; it must be a dense one of "
            "numbers from 0 to 1"
        )
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


def stacked(rows: Sequence[Tensor], name: str) -> Tensor:
    """Pictures [..., H, W] of one size in a batch. Raises ValueError for several sizes."""
    sizes = sorted({size_text(row) for row in rows})
    if len(sizes) > 1:
        raise ValueError(f"{name} holds pictures of sizes {' and '.join(sizes)}; they must be of one size")
    return torch.stack(list(rows))
