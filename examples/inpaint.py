"""A part of a picture painted anew: white in the mask may change, black keeps its pixels exactly."""

import argparse
from pathlib import Path

from PIL import Image, ImageDraw

import calotype


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path(), metavar="FOLDER", help="where the files go")
    folder = parser.parse_args().output

    pipe = calotype.load()
    start = pipe("a cat on a beach", seed=3)
    print(*start.save(folder / "before.png"))

    mask = Image.new("L", (128, 128), "black")
    ImageDraw.Draw(mask).rectangle((24, 32, 104, 120), fill="white")
    mask.save(folder / "mask.png")

    result = pipe("a robot on a beach", image=folder / "before.png", mask_image=mask, strength=1.0, seed=5)
    print(*result.save(folder / "after.png"))


if __name__ == "__main__":
    main()
