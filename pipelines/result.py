"""What a pipeline returns."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from .files import check_target, save_image
from .manifest import Manifest

if TYPE_CHECKING:
    import numpy
    from PIL.Image import Image

    Images = list[Image] | numpy.ndarray | Tensor

OutputType = Literal["pil", "np", "pt", "latent"]
OUTPUT_TYPES: tuple[OutputType, ...] = ("pil", "np", "pt", "latent")
GRID_GAP = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """Pictures, and everything worth knowing about how they came to be.

    `images`: by `output_type` a list of PIL pictures, a float32 array [B, H, W, 3] or tensor [B, 3, H, W] in 0..1, or
    None ("latent"). `videos`: None where pictures were made. `latents` [B, C, F, h, w] float32, as denoised. `seeds`:
    one per picture. `timings`: seconds by stage. `warnings`: what was done otherwise than asked, one line each.
    `manifest`: None where latents alone were decoded; then nobody knows how they were made, and files hold none.
    """

    images: "Images | None"
    latents: Tensor
    seeds: tuple[int, ...]
    timings: Mapping[str, float]
    warnings: tuple[str, ...]
    manifest: Manifest | None = None
    videos: None = None

    def pil(self) -> "list[Image]":
        """The pictures as PIL images, whatever `output_type` was.

        Raises:
            ValueError: `output_type="latent"`, so nothing was decoded.
        """
        if self.images is None:
            raise ValueError("output_type='latent' decodes no pictures: call pipe.decode(result.latents)")
        if isinstance(self.images, list):
            return self.images
        pixels = self.images if isinstance(self.images, Tensor) else torch.from_numpy(self.images).permute(0, 3, 1, 2)
        return to_pil(pixels.float())

    def save(self, path: str | Path) -> tuple[Path, ...]:
        """Writes every picture with its own manifest; returns the files written. Existing files are replaced.

        One picture goes to `path` itself; several are numbered: fox.png becomes fox-1.png, fox-2.png, ...
        Extensions: see `files.save_image`. Every target is checked before the first is written.
        """
        images = self.pil()
        paths = numbered(Path(path), len(images))
        for target in paths:
            check_target(target)
        for row, (image, target) in enumerate(zip(images, paths, strict=True)):
            save_image(image, target, None if self.manifest is None else self.manifest.for_row(row))
        return paths

    def grid(self, columns: int | None = None) -> "Image":
        """Every picture on one sheet, row by row."""
        return grid(self.pil(), columns)

    def save_grid(self, path: str | Path, columns: int | None = None) -> Path:
        """Writes `grid` to one file, with the manifest of the whole batch."""
        return save_image(self.grid(columns), path, self.manifest)


def numbered(path: Path, count: int) -> tuple[Path, ...]:
    """`path` itself for one file; for several fox-1.png, fox-2.png, ..., padded to equal width so that they sort."""
    if count == 1:
        return (path,)
    digits = len(str(count))
    return tuple(path.with_name(f"{path.stem}-{n:0{digits}d}{path.suffix}") for n in range(1, count + 1))


def grid(images: "Sequence[Image]", columns: int | None = None) -> "Image":
    """A contact sheet: pictures of one size in rows of `columns` (default: as square as it gets), 4 white pixels apart.

    Raises:
        ValueError: no pictures, pictures of several sizes, or less than one column.
    """
    from PIL import Image

    sizes = {image.size for image in images}
    if len(sizes) != 1:
        raise ValueError(f"a grid needs pictures of one size, got {sorted(sizes) or 'none'}")
    if columns is not None and columns < 1:
        raise ValueError(f"columns {columns}: expected at least 1")
    across = min(columns or math.ceil(math.sqrt(len(images))), len(images))
    down = math.ceil(len(images) / across)
    width, height = sizes.pop()
    step_x, step_y = width + GRID_GAP, height + GRID_GAP
    sheet = Image.new("RGB", (across * step_x - GRID_GAP, down * step_y - GRID_GAP), "white")
    for n, image in enumerate(images):
        sheet.paste(image, (n % across * step_x, n // across * step_y))
    return sheet


def to_images(pixels: Tensor, output_type: OutputType) -> "Images | None":
    """Decoded pixels [B, 3, 1, H, W] in -1..1 (clamped) as `Result.images` wants them.

    Raises:
        ValueError: an unknown output type.
    """
    if output_type not in OUTPUT_TYPES:
        raise ValueError(f"output_type {output_type!r}: allowed are {', '.join(OUTPUT_TYPES)}")
    if output_type == "latent":
        return None
    unit = (pixels.detach()[:, :, 0].float().cpu() * 0.5 + 0.5).clamp(0, 1)
    if output_type == "pt":
        return unit
    if output_type == "np":
        return unit.permute(0, 2, 3, 1).contiguous().numpy()
    return to_pil(unit)


def to_pil(unit: Tensor) -> "list[Image]":
    """Pixels [B, 3, H, W] in 0..1, in 8 bits."""
    from PIL import Image

    rows = (unit.cpu() * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
    return [Image.fromarray(row) for row in rows]
