"""Contact sheets: pictures in a grid with their captions under them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

CAPTION_WIDTH = 27  # characters in a line under a picture of 128 pixels at scale 1
LINE = 11  # pixels


def contact_sheet(
    pictures: NDArray[np.uint8],
    captions: Sequence[str],
    path: Path | None = None,
    *,
    columns: int = 8,
    right: Sequence[bool] | None = None,
    scale: int = 1,
) -> Image.Image:
    """Lay out uint8 pictures [N, H, W, 3] with captions below, wrong ones (`right` False) in red; saved where a path
    is given.

    `ValueError` where the counts differ.
    """
    if len(captions) != len(pictures) or (right is not None and len(right) != len(pictures)):
        raise ValueError(
            f"{len(pictures)} pictures but {len(captions)} captions"
            + ("" if right is None else f" and {len(right)} verdicts")
        )
    height, width = pictures.shape[1] * scale, pictures.shape[2] * scale
    lines = [_wrapped(caption, CAPTION_WIDTH * width // 128) for caption in captions]
    foot = LINE * max(len(part) for part in lines) + 6
    rows = -(-len(pictures) // columns)
    columns = min(columns, len(pictures))
    sheet = Image.new("RGB", (columns * (width + 6) + 6, rows * (height + foot) + 6), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=9)
    for n, picture in enumerate(pictures):
        row, column = divmod(n, columns)
        x, y = 6 + column * (width + 6), 6 + row * (height + foot)
        sheet.paste(Image.fromarray(picture).resize((width, height), Image.Resampling.NEAREST), (x, y))
        ink = "black" if right is None or right[n] else (200, 0, 0)
        for number, line in enumerate(lines[n]):
            draw.text((x, y + height + 1 + number * LINE), line, fill=ink, font=font)
    if path is not None:
        sheet.save(path)
    return sheet


def _wrapped(caption: str, width: int) -> list[str]:
    lines = [""]
    for word in caption.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
