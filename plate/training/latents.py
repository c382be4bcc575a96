"""Render scenes and encode them once, in shards, so that the denoiser's training reads latents from disk.

    python -m calotype.plate.training.latents --vae runs/vae/vae.safetensors --out runs/latents --shards 20

A shard holds `latents` [N, 8, 16, 16] float16 (normalised), `classes` [N, 8, 8] uint8 (the object on each token) and,
in its metadata, the captions. Shards that are there are left as they are.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...core.whole_file import whole_file
from ...vae.plate import PlateVAE, PlateVAEConfig
from .autoencoder import read_weights
from .captions import training_sample
from .scenes import render, token_classes

SHARD = 2048


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Encoded scenes with their captions."""

    latents: Tensor  # [N, C, h, w] float16
    classes: Tensor  # [N, 8, 8] uint8
    captions: tuple[str, ...]


def make_shard(vae: PlateVAE, seed: int, index: int, count: int = SHARD) -> Shard:
    """Shard number `index`: the same bytes for the same weights, seed and index."""
    random = np.random.default_rng((seed, index))
    samples = [training_sample(random) for _ in range(count)]
    latents: list[Tensor] = []
    for start in range(0, count, 32):
        pictures = np.stack([render(sample.scene) for sample in samples[start : start + 32]])
        pixels = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1
        with torch.inference_mode():
            latents.append(vae.encode(pixels[:, :, None])[:, :, 0].half())
    classes = np.stack([token_classes(sample.scene) for sample in samples]).astype(np.uint8)
    return Shard(
        latents=torch.cat(latents).contiguous(),
        classes=torch.from_numpy(classes),
        captions=tuple(sample.caption for sample in samples),
    )


def write_shard(shard: Shard, path: Path) -> None:
    """Write a shard in one move."""
    tensors = {"latents": shard.latents, "classes": shard.classes}
    with whole_file(path) as part:
        save_file(tensors, part, metadata={"captions": json.dumps(shard.captions)})


def read_shard(path: Path) -> Shard:
    """Read a shard."""
    with safe_open(path, framework="pt") as file:
        captions = tuple(json.loads(file.metadata()["captions"]))
        return Shard(latents=file.get_tensor("latents"), classes=file.get_tensor("classes"), captions=captions)


def write_shards(
    vae: PlateVAE, folder: Path, shards: int, *, first: int = 0, count: int = SHARD, seed: int = 0
) -> None:
    """Write `shards` shards from number `first` on, those that are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(first, first + shards):
        path = folder / f"latents-{index:04d}.safetensors"
        if not path.exists():
            write_shard(make_shard(vae, seed, index, count), path)
            print(path, flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vae", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--first", type=int, default=0, help="number of the first shard: other numbers, other scenes")
    parser.add_argument("--shards", type=int, default=20)
    parser.add_argument("--count", type=int, default=SHARD, help="scenes in a shard")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    vae = PlateVAE(PlateVAEConfig())
    read_weights(vae, arguments.vae)
    first, count, seed = arguments.first, arguments.count, arguments.seed
    write_shards(vae, arguments.out, arguments.shards, first=first, count=count, seed=seed)


if __name__ == "__main__":
    main()
