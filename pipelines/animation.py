"""Clips as animated pictures: GIF (256 colours for the whole clip) and WebP (lossless), frame by frame.

Both are put together here because Pillow, and libwebp behind it, leave out a frame that equals the one before it: then
a clip would come back with fewer frames than were written. Here such a frame is a change of one pixel to itself.

Legend: F frames, H and W pixels; frames are uint8 [F, H, W, 3].
"""

import io
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy

from .files import exif_block

if TYPE_CHECKING:
    from PIL.Image import Image

GIF_UNITS, WEBP_UNITS = 100, 1000  # a frame's duration is counted in such parts of a second
PALETTE_PIXELS = 2**20
_ANIMATED, _WITH_EXIF, _REPLACE = 0x02, 0x08, 0x02
_EXIF_MARK = b"Exif\0\0"


def gif_bytes(frames: numpy.ndarray, fps: float, text: str | None) -> bytes:
    """A GIF that plays for ever; `text` is its comment. One palette for all frames, so that still parts stay still."""
    from PIL import Image
    from PIL.GifImagePlugin import getdata, getheader

    palette = _palette(frames)
    drawn = [Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.FLOYDSTEINBERG) for frame in frames]
    header, _ = getheader(drawn[0].copy(), info={"loop": 0, "comment": (text or "").encode()})
    parts = list(header)
    indices = numpy.stack([numpy.asarray(each) for each in drawn])
    for image, box, duration in zip(drawn, changed(indices), durations(len(drawn), fps, GIF_UNITS), strict=True):
        milliseconds = duration * 1000 // GIF_UNITS
        parts += getdata(image.crop(box), box[:2], duration=milliseconds)
    return b"".join(parts) + b";"


def webp_bytes(frames: numpy.ndarray, fps: float, text: str | None) -> bytes:
    """A WebP that plays for ever, every pixel as it is; `text` is its EXIF image description."""
    from PIL import Image

    height, width = frames.shape[1:3]
    flags = _ANIMATED | (0 if text is None else _WITH_EXIF)
    parts = [_chunk(b"VP8X", bytes([flags, 0, 0, 0]) + _small(width - 1) + _small(height - 1))]
    parts.append(_chunk(b"ANIM", bytes(6)))
    for frame, box, duration in zip(frames, changed(frames), durations(len(frames), fps, WEBP_UNITS), strict=True):
        x, y = box[0] // 2 * 2, box[1] // 2 * 2  # a frame's place is counted in pairs of pixels
        image = Image.fromarray(frame).crop((x, y, *box[2:]))
        place = _small(x // 2) + _small(y // 2) + _small(image.width - 1) + _small(image.height - 1)
        parts.append(_chunk(b"ANMF", place + _small(duration) + bytes([_REPLACE]) + _still(image)))
    if text is not None:
        parts.append(_chunk(b"EXIF", exif_block(text).removeprefix(_EXIF_MARK)))
    return _chunk(b"RIFF", b"WEBP" + b"".join(parts))


def durations(num_frames: int, fps: float, units: int) -> list[int]:
    """How long each frame is shown, in whole units of 1/`units` s; rounded so that no frame begins over half a unit off
    its time."""
    starts = [round(units * index / fps) for index in range(num_frames + 1)]
    return [end - start for start, end in itertools.pairwise(starts)]


def fps_of(shown: Sequence[int], units: int) -> float | None:
    """How many frames are shown in a second, by their durations: the whole number that these were rounded from, if
    there is one; None where they have none."""
    if not any(shown):
        return None
    fps = units * len(shown) / sum(shown)
    whole = max(round(fps), 1)
    return float(whole) if durations(len(shown), whole, units) == [*shown] else fps


def changed(frames: numpy.ndarray) -> Iterator[tuple[int, int, int, int]]:
    """For each frame [H, W, ...] the box (left, top, right, bottom) around what differs from the one before it: all of
    the first frame, a single pixel where nothing does."""
    height, width = frames.shape[1:3]
    yield 0, 0, width, height
    for before, after in itertools.pairwise(frames):
        differs = (before != after).reshape(height, width, -1).any(axis=2)
        rows, columns = (numpy.flatnonzero(differs.any(axis=axis)) for axis in (1, 0))
        if len(rows) == 0:
            yield 0, 0, 1, 1
        else:
            yield int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def _palette(frames: numpy.ndarray) -> "Image":
    """A picture with the palette of the whole clip, made from at most `PALETTE_PIXELS` of its pixels."""
    from PIL import Image

    pixels = frames.reshape(-1, 3)
    spread = pixels[:: -(-len(pixels) // PALETTE_PIXELS)]
    return Image.fromarray(spread[None]).quantize(256, method=Image.Quantize.MEDIANCUT)


def _still(image: "Image") -> bytes:
    """The chunk with the pixels of a picture: what is left of its own WebP without the file's header."""
    file = io.BytesIO()
    image.save(file, "WEBP", lossless=True)
    return file.getvalue()[12:]


def _chunk(name: bytes, body: bytes) -> bytes:
    return name + len(body).to_bytes(4, "little") + body + bytes(len(body) % 2)


def _small(number: int) -> bytes:
    return number.to_bytes(3, "little")
