"""Several pictures at once. Each has its own seed, and is the same whatever else is in the batch."""

import argparse
from pathlib import Path

import torch

import calotype


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path(), metavar="FOLDER", help="where the files go")
    folder = parser.parse_args().output

    pipe = calotype.load()
    prompts = ["two cats", "a rocket on a blue background"]
    batch = pipe(prompts, num_images_per_prompt=2, seed=[1, 2, 3, 4], num_inference_steps=6)
    for path, seed in zip(batch.save(folder / "batch.png"), batch.seeds, strict=True):
        print(f"{path}: seed {seed}")
    print(batch.save_grid(folder / "sheet.png"))

    alone = pipe(prompts[1], seed=batch.seeds[2], num_inference_steps=6)
    difference = (alone.latents[0] - batch.latents[2]).norm() / batch.latents[2].norm()
    print(f"picture 3 made alone differs by {difference:.1e}")
    assert torch.allclose(alone.latents[0], batch.latents[2], atol=1e-3)


if __name__ == "__main__":
    main()
