"""Latents that the denoiser has drawn again, with the pixels that they stand for: so that the decoder learns to make
crisp what a denoiser leaves soft.

    python -m calotype.plate.training.redrawn --model runs/model --out runs/redrawn --shards 4

`--model` is a folder that `export` wrote. A true scene is given the noise of one of the last steps of a run, and the
run is finished from there: what is drawn again has the scene's own layout, so that its pixels stay the target. A shard
holds `pixels` [N, 3, 64, 64] uint8 and `latents` [N, 8, 8, 8] float16 (normalised). Shards that are there are left as
they are.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...core.whole_file import whole_file
from .captions import Sample, training_sample
from .crops import CROP, corner
from .scenes import render

if TYPE_CHECKING:
    from ...pipelines.image import ImagePipeline

SHARD = 1024
BATCH = 16
LATE = (0.2, 0.3, 0.4, 0.5, 0.6)  # the strengths, one for each batch: the last 2 to 6 of 10 steps
CELL = 8  # pixels a side


@dataclass(frozen=True, kw_only=True)
class Redrawn:
    """Crops: `pixels` [N, 3, 64, 64] uint8 and the normalised `latents` [N, C, 8, 8] drawn again."""

    pixels: Tensor
    latents: Tensor


def make_shard(pipe: "ImagePipeline", seed: int, index: int, count: int = SHARD) -> Redrawn:
    """Shard number `index`: the same for the same weights, seed and index. `count` is a multiple of 16."""
    random = np.random.default_rng((seed, index))
    pixels, latents = [], []
    for number in range(count // BATCH):
        samples = [training_sample(random) for _ in range(BATCH)]
        pictures = np.stack([render(sample.scene) for sample in samples])
        seeds = [int(each) for each in random.integers(2**31, size=BATCH)]
        drawn = draw_again(pipe, samples, pictures, seeds, LATE[number % len(LATE)])
        for sample, picture, cells in zip(samples, pictures, drawn, strict=True):
            x, y = corner(sample.scene, random)
            pixels.append(torch.from_numpy(picture[y : y + CROP, x : x + CROP].copy()).permute(2, 0, 1))
            latents.append(cells[:, y // CELL : (y + CROP) // CELL, x // CELL : (x + CROP) // CELL])
    return Redrawn(pixels=torch.stack(pixels).contiguous(), latents=torch.stack(latents).half().contiguous())


def draw_again(
    pipe: "ImagePipeline", samples: Sequence[Sample], pictures: np.ndarray, seeds: list[int], strength: float
) -> Tensor:
    """Normalised latents [N, C, h, w] of uint8 pictures [N, H, W, 3] after the last part of a run."""
    from PIL import Image

    result = pipe(
        [sample.caption for sample in samples],
        image=[Image.fromarray(picture) for picture in pictures],
        strength=strength,
        num_inference_steps=10,
        seed=seeds,
        output_type="latent",
        progress=False,
    )
    return result.latents[:, :, 0]


def read_redrawn(folder: Path) -> Redrawn:
    """All shards of a folder. `FileNotFoundError` where there are none."""
    parts = [load_file(path) for path in sorted(folder.glob("redrawn-*.safetensors"))]
    if not parts:
        raise FileNotFoundError(f"no redrawn-*.safetensors in {folder}")
    return Redrawn(
        pixels=torch.cat([part["pixels"] for part in parts]), latents=torch.cat([part["latents"] for part in parts])
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder that export wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--first", type=int, default=0, help="number of the first shard")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    from ...pipelines.load import load

    pipe = load(arguments.model)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for index in range(arguments.first, arguments.first + arguments.shards):
        path = arguments.out / f"redrawn-{index:04d}.safetensors"
        if not path.exists():
            shard = make_shard(pipe, arguments.seed, index)
            with whole_file(path) as part:
                save_file({"pixels": shard.pixels, "latents": shard.latents}, part)


if __name__ == "__main__":
    main()
