"""A run that ends half way in one process and is finished by another: to the bit what one run makes."""

import argparse
import subprocess
import sys
from itertools import islice
from pathlib import Path

import torch

import calotype

REQUEST = calotype.Request(prompt="a red car in the snow", num_inference_steps=6, seed=7)


def begin(folder: Path) -> None:
    """Three steps, and the state that the next process goes on from."""
    pipe = calotype.load()
    encoded = pipe.encode(REQUEST)
    for step in islice(pipe.denoise(encoded), 3):
        print(f"step {step.index + 1} of {step.total}, in the first process")
        calotype.save_state(step.state, folder / "state.safetensors")  # replaced whole: a crash loses a step at most


def finish(folder: Path) -> None:
    """The steps that are left: the request says what was asked for, the state how far it is."""
    pipe = calotype.load()
    encoded = pipe.encode(REQUEST)
    step = None
    for step in pipe.denoise(encoded, resume=calotype.load_state(folder / "state.safetensors")):
        print(f"step {step.index + 1} of {step.total}, in the second process")
    assert step is not None
    pipe.decode(step).save(folder / "car.png")
    whole = list(pipe.denoise(encoded))[-1]
    assert torch.equal(step.latents, whole.latents)
    print("to the bit what one run makes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path(), metavar="FOLDER", help="where the files go")
    parser.add_argument("--finish", action="store_true", help="go on from the state in that folder")
    options = parser.parse_args()
    if options.finish:
        finish(options.output)
        return
    begin(options.output)
    command = [sys.executable, __file__, "--finish", "-o", str(options.output)]
    print(subprocess.run(command, check=True, capture_output=True, text=True).stdout, end="")


if __name__ == "__main__":
    main()
