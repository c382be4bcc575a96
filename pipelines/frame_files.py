"""Clips as a PNG file for each frame; every file says how many there are, and how fast they are shown.

Legend: F frames, H and W pixels; frames are uint8 [F, H, W, 3].
"""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy

from .files import open_image, write_png
from .frame_names import files_after, first_file, numbered

if TYPE_CHECKING:
    from PIL.Image import Image

KEY = "calotype clip"


def png_frames(frames: numpy.ndarray, fps: float, manifest: str | None) -> Iterator[bytes]:
    """The file of each frame, one after the other."""
    from PIL import Image

    told = {KEY: json.dumps([len(frames), fps])}
    for frame in frames:
        file = io.BytesIO()
        write_png(Image.fromarray(frame), file, manifest, told)
        yield file.getvalue()


def read_frames(path: Path) -> tuple[list["Image"], float | None]:
    """The frames of a clip by the name that it was written with, and how many are shown in a second, if they tell.

    Where files do not say how many they are, as those of other programs, all are taken whose numbers follow.

    Raises:
        FileNotFoundError: no such file, or the file of a frame is missing. ValueError: one cannot be read.
    """
    file = first_file(path)
    first = open_image(file)
    num_frames, fps = _told(first, path)
    if file == path:  # the clip has one frame, or this is one of the frames
        return [first], fps
    files = files_after(file, path) if num_frames is None else numbered(path, num_frames)
    return [open_image(each) for each in files], fps


def _told(first: "Image", path: Path) -> tuple[int | None, float | None]:
    text = first.info.get(KEY)
    if text is None:
        return None, None
    try:
        num_frames, fps = json.loads(text)
        if int(num_frames) < 1:
            raise ValueError
        return int(num_frames), float(fps)
    except (ValueError, TypeError, OverflowError):
        raise ValueError(f"{path}: its number of frames is {text!r}; expected [frames, frames per second]") from None
