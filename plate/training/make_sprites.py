"""Draw `sprites.png`, the atlas that scenes are made of, from a copy of the Noto Color Emoji font. Needed only to
change the objects.

    python -m calotype.plate.training.make_sprites --font NotoColorEmoji.ttf
"""

import argparse
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from .objects import ATLAS_COLUMNS, object_names

SIZE = 96  # pixels of one sprite, the largest size a scene uses
STRIKE = 109  # the only bitmap size in the font


def draw_sprite(emoji: str, font: ImageFont.FreeTypeFont) -> Image.Image:
    """One emoji, cropped to a square around its ink, `SIZE` pixels wide, RGBA."""
    canvas = Image.new("RGBA", (160, 160))
    ImageDraw.Draw(canvas).text((10, 10), emoji, font=font, embedded_color=True)
    left, top, right, bottom = canvas.getchannel("A").point([0] * 9 + [255] * 247).getbbox() or (0, 0, 160, 160)
    side = max(right - left, bottom - top)
    square = Image.new("RGBa", (side, side))
    ink = canvas.crop((left, top, right, bottom)).convert("RGBa")
    square.paste(ink, ((side - ink.width) // 2, (side - ink.height) // 2))
    return square.resize((SIZE, SIZE), Image.Resampling.LANCZOS).convert("RGBA")


def main() -> None:
    """Write the atlas beside this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--font", type=Path, required=True)
    font = ImageFont.truetype(str(parser.parse_args().font), STRIKE)
    names = object_names()
    rows = -(-len(names) // ATLAS_COLUMNS)
    atlas = Image.new("RGBA", (ATLAS_COLUMNS * SIZE, rows * SIZE))
    for index, entry in enumerate(names):
        row, column = divmod(index, ATLAS_COLUMNS)
        atlas.paste(draw_sprite(entry.emoji, font), (column * SIZE, row * SIZE))
    atlas.save(Path(__file__).parent / "sprites.png", optimize=True)


if __name__ == "__main__":
    main()
