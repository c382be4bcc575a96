"""Crops of scenes, chosen where the objects are: what the autoencoder learns from."""

import numpy as np
import torch
from torch import Tensor

from .captions import training_sample
from .scenes import SIDE, SMALL, Scene, render

CROP = 64


def crops(random: np.random.Generator, count: int) -> Tensor:
    """Pixels in -1..1, [count, 3, 64, 64], most of them around an object."""
    out = np.empty((count, CROP, CROP, 3), np.uint8)
    for index in range(0, count, 2):
        scene = _scene(random, with_small=index % 4 == 0)
        picture = render(scene)
        for crop in out[index : index + 2]:
            x, y = corner(scene, random)
            crop[:] = picture[y : y + CROP, x : x + CROP]
    return torch.from_numpy(out).permute(0, 3, 1, 2).float() / 127.5 - 1


def _scene(random: np.random.Generator, *, with_small: bool) -> Scene:
    """A scene of the training set, or of that part of it which has a small object."""
    while True:
        scene = training_sample(random).scene
        if not with_small or any(sprite.size == SMALL for sprite in scene.sprites):
            return scene


def corner(scene: Scene, random: np.random.Generator) -> tuple[int, int]:
    """The upper left corner (x, y) of a crop, in steps of 8 pixels: nine times in ten around an object."""
    if random.random() < 0.1:
        return int(random.integers(9)) * 8, int(random.integers(9)) * 8
    sprite = scene.sprites[random.integers(len(scene.sprites))]
    centre = sprite.size / 2 + random.uniform(-0.4, 0.4, 2) * max(0, sprite.size - 16)
    x, y = (np.array([sprite.x, sprite.y]) + centre - CROP / 2) // 8 * 8
    return int(np.clip(x, 0, SIDE - CROP)), int(np.clip(y, 0, SIDE - CROP))
