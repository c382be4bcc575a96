"""Muon (Jordan et al. 2024): momentum whose update is made nearly orthogonal by Newton-Schulz steps, for the matrices
inside blocks."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed, nn


class Muon(torch.optim.Optimizer):
    """Updates 2-D parameters; `parts[i]` says into how many equal row blocks parameter i falls (3 for qkv, 2 for gate
    and up). `processes` processes that hold equal gradients divide the work: number `rank` does every so many-th
    row block, and they add up what they have (the same bits as one process alone)."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        parts: list[int],
        *,
        lr: float,
        momentum: float = 0.95,
        rank: int = 0,
        processes: int = 1,
    ) -> None:
        super().__init__(list(parameters), {"lr": lr, "momentum": momentum})
        self.parts, self.rank, self.processes = parts, rank, processes

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            pairs = [pair for pair in zip(group["params"], self.parts, strict=True) if pair[0].grad is not None]
            steps = [self._direction(parameter, group["momentum"]) for parameter, _ in pairs]
            pieces = [rows for step, (_, parts) in zip(steps, pairs, strict=True) for rows in step.chunk(parts)]
            for number, rows in enumerate(pieces):
                mine = number % self.processes == self.rank
                rows.copy_(_scaled(orthogonalise(rows)) if mine else torch.zeros_like(rows))
            if self.processes > 1:
                sum_over_processes(steps)
            for (parameter, _), step in zip(pairs, steps, strict=True):
                parameter.add_(step, alpha=-group["lr"])

    def _direction(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        """Nesterov's direction, a new tensor; the momentum takes up the gradient."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum"]
        buffer.mul_(momentum).add_(parameter.grad)
        return parameter.grad + momentum * buffer


def _scaled(rows: Tensor) -> Tensor:
    return rows * max(1.0, rows.shape[0] / rows.shape[1]) ** 0.5


def sum_over_processes(tensors: list[Tensor]) -> None:
    """Replace each tensor by its sum over all processes, in one message."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    distributed.all_reduce(flat)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


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
