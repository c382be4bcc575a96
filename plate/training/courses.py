"""What the denoiser is taught: encoded pictures and clips, in batches without end.

Legend: N scenes, C latent channels, f latent frames, h w latent cells.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...language.tokenizer import Tokenizer
from .latents import read_shard

MAX_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class Data:
    """All encoded scenes: latents [N, C, h, w] (of clips [N, C, f, h, w]), classes [N, 8, 8] (of clips [N, f, 8, 8]),
    token ids per caption."""

    latents: Tensor
    classes: Tensor
    ids: list[list[int]]


def load_data(folder: Path, tokenizer: Tokenizer, shards: int) -> Data:
    """The first `shards` shards of a folder."""
    parts = [read_shard(path) for path in sorted(folder.glob("latents-*.safetensors"))[:shards]]
    if not parts:
        raise FileNotFoundError(f"no latents-*.safetensors in {folder}")
    return Data(
        latents=torch.cat([part.latents for part in parts]),
        classes=torch.cat([part.classes for part in parts]),
        ids=[prompt_ids(tokenizer, caption) for part in parts for caption in part.captions],
    )


@dataclass(kw_only=True)
class Course:
    """Scenes of one kind, in batches without end, `part` of which go through the network at once, with a `share` of
    their tokens; the running means of both losses."""

    name: str
    data: Data
    part: int
    share: float
    stream: Iterator[list[int]]
    means: tuple[float, float] = (0.0, 0.0)


def prompt_ids(tokenizer: Tokenizer, caption: str) -> list[int]:
    """The ids that the text encoder reads for a caption."""
    special = tokenizer.special
    return [special.bos, *tokenizer.encode(caption)[: MAX_TOKENS - 2], special.eos]


def batches(data: Data, size: int, seed: int, first: int) -> Iterator[list[int]]:
    """Endless batches of indices, from batch number `first` on; captions of one batch have similar lengths."""
    per_epoch = len(data.ids) // size
    number = first
    while True:
        random = np.random.default_rng((seed, number // per_epoch))
        order = random.permutation(len(data.ids))
        groups: list[list[int]] = []
        for start in range(0, len(order), size * 16):
            chunk = sorted((int(i) for i in order[start : start + size * 16]), key=lambda i: len(data.ids[i]))
            groups += [chunk[n : n + size] for n in range(0, len(chunk) - size + 1, size)]
        random.shuffle(groups)
        for group in groups[number % per_epoch :]:
            yield group
            number += 1


def courses_of(arguments: argparse.Namespace, tokenizer: Tokenizer, step: int) -> list[Course]:
    """What the model is taught in turns, from that step on: pictures, and clips where there are any."""
    a = arguments
    kinds = [("", a.latents, a.shards, a.batch, a.part, 1.0)]
    if a.clips:
        kinds.append(("clip_", a.clips, a.clip_shards, a.clip_batch, a.clip_part, a.clip_share))
    courses: list[Course] = []
    for turn, (name, folder, shards, batch, part, share) in enumerate(kinds):
        data, taken = load_data(folder, tokenizer, shards), (step - turn + len(kinds) - 1) // len(kinds)
        stream = batches(data, batch, a.seed, taken)
        courses.append(Course(name=name, data=data, part=part, share=share, stream=stream))
    return courses


def figures(courses: Sequence[Course]) -> dict[str, float]:
    """The running means of all courses' losses."""
    found: dict[str, float] = {}
    for course in courses:
        found |= {f"{course.name}flow": round(course.means[0], 5), f"{course.name}auxiliary": round(course.means[1], 4)}
    return found


def smoothed(means: tuple[float, float], found: tuple[float, float]) -> tuple[float, float]:
    """Running means of two losses; those of nothing yet are 0."""
    first, second = (0.98 * mean + 0.02 * value if mean else value for mean, value in zip(means, found, strict=True))
    return first, second
