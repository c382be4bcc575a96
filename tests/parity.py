"""What tests share that compare with another library, row by row and step by step."""

from typing import Any

import torch
from torch import Tensor

from calotype.core.attention.registry import attention_selector
from calotype.denoisers.base import Conditioning, Denoiser
from calotype.schedulers import flow_schedule
from calotype.schedulers.base import Point


def generators(*seeds: int) -> list[torch.Generator]:
    """One for each row, as diffusers' pipelines take them."""
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def error(ours: Tensor, reference: Tensor) -> float:
    """The largest relative error of a row."""
    assert ours.shape == reference.shape
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, reference, strict=True))


def slopes(
    model: Denoiser[Any], told: Conditioning, x: Tensor, steps: int = 3
) -> tuple[list[Tensor], tuple[Point, ...]]:
    """A denoiser's slopes at the points of a shifted schedule, and these points."""
    points = flow_schedule(steps, 1.7).points[:-1]
    prepared = model.prepare(told, tuple(x.shape), points, attention=attention_selector())
    return [model.slope(x, prepared, point) for point in points], points
