"""A picture from words."""

import argparse
from pathlib import Path

import calotype


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path(), metavar="FOLDER", help="where the files go")
    folder = parser.parse_args().output

    pipe = calotype.load()  # the bundled model: offline, on the CPU
    result = pipe("a fox on a beach", num_inference_steps=10, guidance_scale=2.0, seed=7)

    (path,) = result.save(folder / "fox.png")  # with everything needed to make it again inside
    print(f"{path}: {result.timings['denoise']:.2f} s of denoising, seed {result.seeds[0]}")
    print(f"made by {calotype.read_manifest(path).model}; try: calotype replay {path}")


if __name__ == "__main__":
    main()
