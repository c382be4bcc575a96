"""One picture made from another: the more strength, the less is left of it."""

import argparse
from pathlib import Path

import calotype


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path(), metavar="FOLDER", help="where the files go")
    folder = parser.parse_args().output

    pipe = calotype.load()
    start = pipe("a cat on a beach", seed=3)
    print(*start.save(folder / "start.png"))

    for strength in (0.0, 0.5, 0.8):  # 0 is the autoencoder's round trip
        result = pipe("a dog on a beach", image=folder / "start.png", strength=strength, seed=3)
        print(*result.save(folder / f"strength-{strength}.png"))


if __name__ == "__main__":
    main()
