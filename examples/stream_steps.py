"""A run watched step by step: a preview of each, stopped half way, saved, and finished later."""

import argparse
from itertools import islice
from pathlib import Path

import calotype


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path(), metavar="FOLDER", help="where the files go")
    folder = parser.parse_args().output

    pipe = calotype.load()
    encoded = pipe.encode(calotype.Request(prompt="a red car in the snow", num_inference_steps=8, seed=7))

    for step in islice(pipe.denoise(encoded), 4):  # leaving the loop is all it takes to cancel
        path = folder / f"preview-{step.index}.png"
        pipe.preview(step)[0].resize((128, 128)).save(path)  # a pixel per latent cell; no decoder runs
        print(f"step {step.index + 1} of {step.total}, sigma {step.sigma:.2f}: {path}")
        calotype.save_state(step.state, folder / "state.safetensors")

    for step in pipe.denoise(encoded, resume=calotype.load_state(folder / "state.safetensors")):
        print(f"step {step.index + 1} of {step.total}, sigma {step.sigma:.2f}")
        result = pipe.decode(step)  # any step can be decoded
        result.save(folder / "car.png")


if __name__ == "__main__":
    main()
