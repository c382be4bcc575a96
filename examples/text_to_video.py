"""A clip from words, as a file and as a sheet of its frames."""

import argparse
from pathlib import Path

import calotype


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path(), metavar="FOLDER", help="where the files go")
    folder = parser.parse_args().output

    pipe = calotype.load()  # the bundled model; any other that makes clips is used alike
    result = pipe("a frog jumps up on a green field", num_frames=17, seed=7)

    (path,) = result.save(folder / "frog.mp4")  # also .webm, .gif, .webp, or .png for each frame
    sheet = result.save_grid(folder / "frames.png")
    print(f"{path}: {len(result.videos[0])} frames, {result.fps:g} a second; 16 of them in {sheet}")


if __name__ == "__main__":
    main()
