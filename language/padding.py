"""Rows of ids of different lengths as one tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor


def padded(rows: Sequence[Sequence[int]], fill: int = 0) -> Tensor:
    """The rows as [B, L] int64, L the length of the longest; `fill` stands after the ends of the others."""
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows], dtype=torch.int64)
