"""Render scenes and encode them once, in shards, so that the denoiser's training reads latents from disk.

    python -m calotype.plate.training.latents --vae runs/vae/vae.safetensors --out runs/latents --shards 20

A shard holds `latents` [N, 8, 16, 16] float16 (normalised), `classes` [N, 8, 8] uint8 (the object on each token) and,
in its metadata, the captions. With `--kind clips` they are the key frames of clips: `latents` [N, 8, 5, 16, 16],
`classes` [N, 5, 8, 8]. Of what is rare otherwise alone: `--kind placed`, single objects in stated places,
`--kind uneven`, a large object beside a small one, and clips: `--kind reshaped`, of one object that grows, shrinks or
turns, `--kind turned`, of one that turns, `--kind pairs`, of two objects. Shards that are there are left as they are.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...core.whole_file import whole_file
from ...vae.plate import PlateVAE, PlateVAEConfig
from .autoencoder import read_weights
from .captions import Sample, training_sample
from .motions import Clip, clip_classes, key_frames, render_clip, reshaped_clip, training_clip, training_pair
from .scenes import LARGE, SMALL, render, token_classes

SHARD = 2048


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Encoded scenes with their captions."""

    latents: Tensor  # [N, C, h, w] float16, of clips [N, C, f, h, w]
    classes: Tensor  # [N, 8, 8] uint8, of clips [N, f, 8, 8]
    captions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A caption, and the pictures [f, 128, 128, 3] and classes [f, 8, 8] that it stands for."""

    caption: str
    pictures: NDArray[np.uint8]
    classes: NDArray[np.int64]


Draw = Callable[[np.random.Generator], Drawn]


def drawn_scene(random: np.random.Generator) -> Drawn:
    """A scene of the training set."""
    return _drawn(training_sample(random))


def drawn_placed(random: np.random.Generator) -> Drawn:
    """One with a single object, whose place is stated."""
    while True:
        sample = training_sample(random)
        if sample.facts.column is not None or sample.facts.row is not None:
            return _drawn(sample)


def drawn_uneven(random: np.random.Generator) -> Drawn:
    """One with two objects, a large and a small one."""
    while True:
        sample = training_sample(random)
        if sorted(sprite.size for sprite in sample.scene.sprites) == [SMALL, LARGE]:
            return _drawn(sample)


def _drawn(sample: Sample) -> Drawn:
    pictures, classes = render(sample.scene)[None], token_classes(sample.scene)[None]
    return Drawn(caption=sample.caption, pictures=pictures, classes=classes)


def drawn_clip(random: np.random.Generator) -> Drawn:
    """The key frames of a clip of the training set."""
    return _key_frames_of(training_clip(random))


def drawn_reshaped(random: np.random.Generator) -> Drawn:
    """Those of one in which an object grows, shrinks or turns."""
    return _key_frames_of(reshaped_clip(random))


def drawn_turned(random: np.random.Generator) -> Drawn:
    """Those of one in which an object turns."""
    return _key_frames_of(reshaped_clip(random, ("spin",)))


def drawn_pair(random: np.random.Generator) -> Drawn:
    """Those of one in which two objects move."""
    return _key_frames_of(training_pair(random))


def _key_frames_of(clip: Clip) -> Drawn:
    keys = key_frames()
    classes = np.stack([clip_classes(clip, frame) for frame in keys])
    return Drawn(caption=clip.caption, pictures=render_clip(clip, keys), classes=classes)


DRAWN: dict[str, Draw] = {
    "scenes": drawn_scene,
    "clips": drawn_clip,
    "placed": drawn_placed,
    "uneven": drawn_uneven,
    "reshaped": drawn_reshaped,
    "turned": drawn_turned,
    "pairs": drawn_pair,
}


def make_shard(vae: PlateVAE, seed: int, index: int, count: int = SHARD, draw: Draw = drawn_scene) -> Shard:
    """Shard number `index`: the same bytes for the same weights, seed and index."""
    random = np.random.default_rng((seed, index))
    latents: list[Tensor] = []
    classes: list[NDArray[np.int64]] = []
    captions: list[str] = []
    for start in range(0, count, 32):
        part = [draw(random) for _ in range(min(32, count - start))]
        latents.append(_encoded(vae, np.stack([drawn.pictures for drawn in part])))
        classes += [drawn.classes for drawn in part]
        captions += [drawn.caption for drawn in part]
    whole, kinds = torch.cat(latents), torch.from_numpy(np.stack(classes).astype(np.uint8))
    if whole.shape[2] == 1:
        whole, kinds = whole[:, :, 0], kinds[:, 0]
    return Shard(latents=whole.contiguous(), classes=kinds.contiguous(), captions=tuple(captions))


@torch.inference_mode()
def _encoded(vae: PlateVAE, pictures: NDArray[np.uint8]) -> Tensor:
    """Latents [N, C, f, h, w] of pictures [N, f, 128, 128, 3], each on its own."""
    pixels = torch.from_numpy(pictures).permute(0, 4, 1, 2, 3).float() / 127.5 - 1
    return vae.encode(pixels).half()


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
    vae: PlateVAE,
    folder: Path,
    shards: int,
    *,
    first: int = 0,
    count: int = SHARD,
    seed: int = 0,
    draw: Draw = drawn_scene,
) -> None:
    """Write `shards` shards from number `first` on, those that are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(first, first + shards):
        path = folder / f"latents-{index:04d}.safetensors"
        if not path.exists():
            write_shard(make_shard(vae, seed, index, count, draw), path)
            print(path, flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vae", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--first", type=int, default=0, help="number of the first shard: other numbers, other scenes")
    parser.add_argument("--shards", type=int, default=20)
    parser.add_argument("--count", type=int, default=SHARD, help="scenes in a shard")
    parser.add_argument("--kind", choices=DRAWN, default="scenes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    vae = PlateVAE(PlateVAEConfig())
    read_weights(vae, arguments.vae)
    first, count, seed = arguments.first, arguments.count, arguments.seed
    draw = DRAWN[arguments.kind]
    write_shards(vae, arguments.out, arguments.shards, first=first, count=count, seed=seed, draw=draw)


if __name__ == "__main__":
    main()
