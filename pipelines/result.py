"""What a pipeline returns."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor

from .checks import check_kind
from .files import check_target, save_image
from .frame_names import numbered
from .manifest import Manifest

if TYPE_CHECKING:
    import numpy
    from PIL.Image import Image

    Images = list[Image] | numpy.ndarray | Tensor
    Videos = list[list[Image]] | numpy.ndarray | Tensor

OutputType = Literal["pil", "np", "pt", "latent"]
OUTPUT_TYPES: tuple[OutputType, ...] = ("pil", "np", "pt", "latent")
GRID_GAP = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """Pictures, and everything worth knowing about how they came to be.

    `images`: by `output_type` a list of PIL pictures, a float32 array [B, H, W, 3] or tensor [B, 3, H, W] in 0..1, or
    None ("latent"). `videos`, of a model that makes clips: lists of PIL pictures, an array [B, F, H, W, 3] or tensor
    [B, F, 3, H, W], `fps` frames a second; clips of one frame are `images` too. `latents` [B, C, F, h, w] float32, as
    denoised. `seeds`: one per picture. `timings`: seconds by stage. `warnings`: what was done otherwise than asked, one
    line each.
    `manifest`: None where latents alone were decoded; then nobody knows how they were made, and files hold none.
    """

    images: "Images | None"
    latents: Tensor
    seeds: tuple[int, ...]
    timings: Mapping[str, float]
    warnings: tuple[str, ...]
    manifest: Manifest | None = None
    videos: "Videos | None" = None
    fps: float | None = None

    def pil(self) -> "list[Image]":
        """The pictures as PIL images, whatever `output_type` was.

        Raises:
            ValueError: `output_type="latent"`, so nothing was decoded; or clips of several frames were made.
        """
        if self.images is None and self.videos is not None:
            raise ValueError("clips were made, not pictures: result.clips() has their frames")
        if self.images is None:
            raise ValueError("output_type='latent' decodes no pictures: call pipe.decode(result.latents)")
        if isinstance(self.images, list):
            return self.images
        pixels = self.images if isinstance(self.images, Tensor) else torch.from_numpy(self.images).permute(0, 3, 1, 2)
        return to_pil(pixels.float())

    def clips(self) -> "list[numpy.ndarray]":
        """The frames of each clip in 8 bits, uint8 [F, H, W, 3], whatever `output_type` was.

        Raises:
            ValueError: `output_type="latent"`, so nothing was decoded; or pictures were made.
        """
        import numpy

        if self.videos is None:
            made = "output_type='latent' decodes no clips" if self.images is None else "pictures were made, not clips"
            raise ValueError(f"{made}: call pipe.decode(result.latents), or result.pil() for pictures")
        if isinstance(self.videos, list):
            return [numpy.stack([numpy.asarray(frame) for frame in clip]) for clip in self.videos]
        if isinstance(self.videos, Tensor):
            unit = self.videos.permute(0, 1, 3, 4, 2)
        else:
            unit = torch.from_numpy(self.videos)
        return [*(unit.float().cpu() * 255).round().to(torch.uint8).contiguous().numpy()]

    def save(self, path: str | Path, *, fps: float | None = None, codec: str | None = None) -> tuple[Path, ...]:
        """Writes every picture or clip with its own manifest; returns the files written. Existing files are replaced.

        One goes to `path` itself; several are numbered: fox.png becomes fox-1.png, fox-2.png, ...
        Extensions: see `files.save_image`, for clips `clips.save_clip`, which `fps` (default: the result's own) and
        `codec` are for. Every target is checked before the first is written.

        Raises:
            ValueError: `path` is no name of a file, or of a kind that cannot be written. FileNotFoundError: its folder
            does not exist.
        """
        check_kind("path", path, (str, Path), "the name of a file, such as 'fox.png'")
        if self.videos is not None:
            return self._save_clips(Path(path), fps, codec)
        if fps is not None or codec is not None:
            raise ValueError("fps and codec are for clips, and this result holds pictures")
        images = self.pil()
        paths = numbered(Path(path), len(images))
        for target in paths:
            check_target(target)
        for row, (image, target) in enumerate(zip(images, paths, strict=True)):
            save_image(image, target, self._manifest(row))
        return paths

    def grid(self, columns: int | None = None) -> "Image":
        """Every picture on one sheet, row by row; of clips, frames from the first to the last, one clip after the
        other."""
        if self.videos is None:
            return grid(self.pil(), columns)
        from .clips import spread_frames

        return grid([frame for clip in self.clips() for frame in spread_frames(clip)], columns)

    def _save_clips(self, path: Path, fps: float | None, codec: str | None) -> tuple[Path, ...]:
        from .clips import check_clip_target, save_clip

        clips = self.clips()
        rate = self.fps if fps is None else fps
        if rate is None:
            raise ValueError("fps is not known: say how many frames are shown in a second")
        paths = numbered(path, len(clips))
        for target in paths:
            check_clip_target(target, fps=rate, codec=codec)
        written = [
            save_clip(clip, target, fps=rate, manifest=self._manifest(row), codec=codec)
            for row, (clip, target) in enumerate(zip(clips, paths, strict=True))
        ]
        return tuple(file for files in written for file in files)

    def _manifest(self, row: int) -> Manifest | None:
        return None if self.manifest is None else self.manifest.for_row(row)

    def save_grid(self, path: str | Path, columns: int | None = None) -> Path:
        """Writes `grid` to one file, with the manifest of the whole batch."""
        return save_image(self.grid(columns), path, self.manifest)


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


def to_videos(pixels: Tensor, output_type: OutputType) -> "Videos | None":
    """Decoded pixels [B, 3, F, H, W] in -1..1 (clamped) as `Result.videos` wants them. Errors as for `to_images`."""
    rows = [to_images(row.transpose(0, 1)[:, :, None], output_type) for row in pixels]  # frames as a batch of pictures
    if output_type == "pil":
        return cast("list[list[Image]]", rows)
    if output_type == "pt":
        return torch.stack(cast(list[Tensor], rows))
    return _stacked(rows) if output_type == "np" else None


def to_sheets(pixels: Tensor) -> "list[Image]":
    """Pixels [B, 3, F, H, W] in -1..1 (clamped): each row's frames on one sheet, one alone as it is."""
    videos = cast("list[list[Image]]", to_videos(pixels, "pil"))
    return [frames[0] if len(frames) == 1 else grid(frames) for frames in videos]


def _stacked(rows: "Sequence[Images | None]") -> "numpy.ndarray":
    import numpy

    return numpy.stack(cast("list[numpy.ndarray]", rows))


def to_pil(unit: Tensor) -> "list[Image]":
    """Pixels [B, 3, H, W] in 0..1, in 8 bits."""
    from PIL import Image

    rows = (unit.cpu() * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
    return [Image.fromarray(row) for row in rows]
