"""Clips in files: written whole or not at all, with the manifest inside, and read again.

| extension | frames | |
|---|---|---|
| .mp4 | H.264 (or VP9) | lossy; 4:2:0 colours, 4:4:4 where H.264 needs it to keep an odd size |
| .webm | VP9 | lossy |
| .gif | 256 colours | lossy; at most 50 frames a second, in hundredths of a second |
| .webp | animated WebP | lossless |
| .png | one file per frame: clip-1.png, clip-2.png, ... | lossless |

Legend: F frames, H and W pixels.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING

import numpy

from ..core.whole_file import whole_file
from .animation import GIF_UNITS, WEBP_UNITS, fps_of, gif_bytes, webp_bytes
from .files import as_shown, check_place, open_image
from .frame_files import png_frames, read_frames
from .frame_names import numbered
from .manifest import Manifest, digest_input
from .result import grid
from .streams import CONTAINERS, read_stream, stream_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

PICTURES = (".gif", ".webp", ".jpg", ".jpeg")
LOSSY_CLIPS = (*CONTAINERS, ".gif")
SLOWEST, FASTEST = 0.1, 240.0
FASTEST_GIF = GIF_UNITS / 2  # browsers slow down what is shown for a shorter time
MOST_PIXELS = 2**30
SHEET_FRAMES = 16
_ANIMATIONS: Mapping[str, Callable[[numpy.ndarray, float, str | None], bytes]] = {
    ".gif": gif_bytes,
    ".webp": webp_bytes,
}
EXTENSIONS = (*CONTAINERS, *_ANIMATIONS, ".png")


@dataclass(frozen=True, kw_only=True, eq=False)
class Clip:
    """A clip from a file: `frames` uint8 [F, H, W, 3]; `fps` None where the file does not tell."""

    frames: numpy.ndarray
    fps: float | None


def save_clip(
    frames: numpy.ndarray,
    path: str | Path,
    *,
    fps: float,
    manifest: Manifest | None = None,
    codec: str | None = None,
) -> tuple[Path, ...]:
    """Writes frames, uint8 [F, H, W, 3], as one clip of exactly that size and number; returns the files written.

    The manifest, with a digest of the frames, goes into the container's comment, the GIF's comment, the EXIF image
    description or the PNG text "calotype". `codec`: of a .mp4 "h264" (default) or "vp9". Files appear under their names
    only when they are complete. A picture with the name after which frames are numbered is removed: it would be read in
    their place.

    Raises:
        ValueError, FileNotFoundError, OSError: as `check_clip_target`; these are no frames; the disk is full.
    """
    _check_frames(frames)
    target = check_clip_target(path, fps=fps, codec=codec, num_frames=len(frames))
    made = None if manifest is None else dataclasses.replace(manifest, frames=digest_input(frames))
    text = None if made is None else made.to_json()
    if target.suffix.lower() == ".png":
        targets = numbered(target, len(frames))
        bodies = png_frames(frames, float(fps), text)
    else:
        targets = (target,)
        bodies = iter((_encoded(frames, target, float(fps), text, codec),))
    try:
        with ExitStack() as whole:  # all files get their names together
            for each, body in zip(targets, bodies, strict=True):
                whole.enter_context(whole_file(each.resolve())).write_bytes(body)
        if target not in targets:
            target.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(target)) from error
    return targets


def check_clip_target(
    path: str | Path, *, fps: float | None = None, codec: str | None = None, num_frames: int = 1
) -> Path:
    """`path`, if a clip can be written there like that: to be asked before any compute. `fps` None: not known yet.
    `num_frames`: how many files a .png stands for.

    Raises:
        ValueError: unknown extension, unknown codec, frames per second out of range, or a name that cannot be a file.
        FileNotFoundError: the folder does not exist. OSError: the folder cannot be written to.
    """
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in EXTENSIONS:
        raise ValueError(f"{target}: extension {target.suffix!r} is unknown; allowed are {', '.join(EXTENSIONS)}")
    if suffix in CONTAINERS:
        CONTAINERS[suffix].codec(codec)
    elif codec is not None:
        raise ValueError(f"codec {codec!r}: a {suffix} has no choice of codecs, {' and '.join(CONTAINERS)} have one")
    most = FASTEST_GIF if suffix == ".gif" else FASTEST
    if fps is not None and not (_is_number(fps) and SLOWEST <= fps <= most):
        raise ValueError(f"fps is {fps!r}; for {suffix} it must be from {SLOWEST:g} to {most:g}")
    for each in numbered(target, num_frames if suffix == ".png" else 1):
        check_place(each)
    return target


def read_clip(path: str | Path) -> Clip:
    """A clip from a file: any video that FFmpeg reads, an animated picture, a still one as one frame, or, by the name
    that it was written with, a sequence of PNG files.

    Raises:
        FileNotFoundError: no such file. ValueError: not a clip that can be read, a damaged one, or too large a one.
    """
    source = Path(path)
    suffix = source.suffix.lower()
    if suffix == ".png":
        pictures, fps = read_frames(source)
        shown = [numpy.asarray(as_shown(each, str(source))) for each in pictures]
        return Clip(frames=_stacked(shown, source), fps=fps)
    if not source.is_file():
        raise FileNotFoundError(f"{source}: no such file")
    if suffix in PICTURES:
        return _animation(source)
    frames, fps = read_stream(source, MOST_PIXELS)
    return Clip(frames=_stacked(frames, source), fps=fps)


def may_be_clip(path: str | Path) -> bool:
    """Whether a file holds several frames, by its name or, of animations, by what is in it."""
    suffix = Path(path).suffix.lower()
    return suffix in CONTAINERS or (suffix in _ANIMATIONS and len(read_clip(path).frames) > 1)


def contact_sheet(frames: numpy.ndarray, *, columns: int | None = None, number: int = SHEET_FRAMES) -> "Image":
    """At most `number` frames of a clip, uint8 [F, H, W, 3], from the first to the last, on one sheet.

    Raises:
        ValueError: these are no frames, or a number or columns below 1.
    """
    return grid(spread_frames(frames, number), columns)


def spread_frames(frames: numpy.ndarray, number: int = SHEET_FRAMES) -> "list[Image]":
    """At most `number` frames of a clip, equally far apart, the first and the last among them. Errors as above."""
    from PIL import Image

    _check_frames(frames)
    if number < 1:
        raise ValueError(f"number is {number}; it must be at least 1")
    chosen = numpy.linspace(0, len(frames) - 1, min(number, len(frames))).round().astype(int)
    return [Image.fromarray(frames[index]) for index in chosen]


def _encoded(frames: numpy.ndarray, target: Path, fps: float, text: str | None, codec: str | None) -> bytes:
    suffix = target.suffix.lower()
    if suffix in CONTAINERS:
        return stream_bytes(frames, fps, text, CONTAINERS[suffix], codec)
    return _ANIMATIONS[suffix](frames, fps, text)


def _animation(path: Path) -> Clip:
    from PIL import Image, ImageSequence

    open_image(path)  # refuses what is no picture
    frames: list[numpy.ndarray] = []
    milliseconds: list[int] = []
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(path) as image:
            for frame in ImageSequence.Iterator(image):
                frames.append(numpy.asarray(as_shown(frame, str(path))))
                milliseconds.append(int(frame.info.get("duration") or 0))
                if len(frames) * image.width * image.height > MOST_PIXELS:
                    raise ValueError(f"{path}: holds more than the {MOST_PIXELS} pixels that are read: cut it shorter")
    except (OSError, SyntaxError) as error:
        raise ValueError(f"{path}: cannot be read as a clip: {error}") from None
    units = GIF_UNITS if path.suffix.lower() == ".gif" else WEBP_UNITS
    return Clip(frames=_stacked(frames, path), fps=fps_of([each * units // 1000 for each in milliseconds], units))


def _stacked(frames: Sequence[numpy.ndarray], path: Path) -> numpy.ndarray:
    sizes = sorted({f"{frame.shape[1]}x{frame.shape[0]}" for frame in frames})
    if len(sizes) > 1:
        raise ValueError(f"{path}: its frames have several sizes: {', '.join(sizes)}")
    return numpy.stack(frames)


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real)


def _check_frames(frames: numpy.ndarray) -> None:
    if frames.dtype != numpy.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or not frames.size:
        raise ValueError(f"frames are {frames.dtype} {list(frames.shape)}; expected uint8 [F, H, W, 3], none of them 0")
