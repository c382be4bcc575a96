"""Muon (Jordan et al. 2024): momentum whose update is made nearly orthogonal by Newton-Schulz steps, for the matrices
inside blocks."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Muon(torch.optim.Optimizer):
    """Updates 2-D parameters; `parts[i]` says into how many equal row blocks parameter i falls (3 for qkv, 2 for gate
    and up)."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], parts: list[int], *, lr: float, momentum: float = 0.95
    ) -> None:
        super().__init__(list(parameters), {"lr": lr, "momentum": momentum})
        self.parts = parts

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            for parameter, parts in zip(group["params"], self.parts, strict=True):
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                buffer: Tensor = state["momentum"]
                buffer.mul_(group["momentum"]).add_(parameter.grad)
                update = parameter.grad + group["momentum"] * buffer
                for rows, target in zip(update.chunk(parts), parameter.chunk(parts), strict=True):
                    scale = max(1.0, rows.shape[0] / rows.shape[1]) ** 0.5
                    target.add_(orthogonalise(rows), alpha=-group["lr"] * scale)


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """The nearest orthogonal matrix, roughly: all singular values come near 1 (quintic Newton-Schulz)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x
