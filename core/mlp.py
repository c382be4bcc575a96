"""Feed-forward layers."""

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from .ops import kernels
from .ops.row_product import Linear, WideLinear

Activation: TypeAlias = Literal["silu", "gelu_tanh"]


class Feedforward(Protocol):
    """A kind of MLP, for blocks that make their own layers of it."""

    def inner_width(self, hidden: int) -> int:
        """The width of the first layer's output, for an MLP `hidden` wide."""
        ...

    def activated(self, inner: Tensor) -> Tensor:
        """The first layer's output [..., inner_width] as the second's input [..., hidden]."""
        ...

    def build(self, width: int, hidden: int, *, bias: bool) -> nn.Module:
        """The whole MLP as a module."""
        ...


@dataclass(frozen=True)
class GELU:
    """down(gelu(up(x))), the GELU approximated by tanh."""

    def inner_width(self, hidden: int) -> int:
        """`hidden`."""
        return hidden

    def activated(self, inner: Tensor) -> Tensor:
        """gelu(inner); where no gradient can follow, `inner` is changed."""
        return gelu(inner, "tanh")

    def build(self, width: int, hidden: int, *, bias: bool) -> nn.Module:
        """A `GELUMLP`."""
        return GELUMLP(width, hidden, bias=bias)


@dataclass(frozen=True)
class SwiGLU:
    """down(silu(gate(x)) * up(x)) (Shazeer 2020), gate first."""

    def inner_width(self, hidden: int) -> int:
        """Gate and up, side by side."""
        return 2 * hidden

    def activated(self, inner: Tensor) -> Tensor:
        """silu(gate) * up; where no gradient can follow, `inner` is changed."""
        return gated(inner, "silu")

    def build(self, width: int, hidden: int, *, bias: bool) -> nn.Module:
        """A `GatedMLP`."""
        return GatedMLP(width, hidden, bias=bias)


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up, for gate and up side by side, gate first: [..., 2 hidden] to [..., hidden].

    Where no gradient can follow, the gate's memory takes the result: on a CPU, fresh memory of this size costs more
    than the arithmetic.
    """
    if activation == "silu" and gate_up.shape[-1] % 2 == 0 and kernels.runs(gate_up):
        return kernels.silu_gate(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    keeps = torch.is_grad_enabled()
    activated = functional.silu(gate, inplace=not keeps) if activation == "silu" else gelu(gate, "tanh")
    return activated * up if keeps else activated.mul_(up)


def gelu(x: Tensor, approximate: Literal["none", "tanh"]) -> Tensor:
    """gelu(x), in x's memory where no gradient can follow (see `gated`)."""
    if torch.is_grad_enabled():
        return functional.gelu(x, approximate=approximate)
    if approximate == "tanh" and x.is_contiguous() and kernels.runs(x):
        return kernels.gelu_tanh_(x)
    return torch.ops.aten.gelu_(x, approximate=approximate)


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)) (Shazeer 2020); gate and up are one matrix, gate first."""

    def __init__(self, width: int, hidden: int, *, bias: bool = False, activation: Activation = "silu") -> None:
        super().__init__()
        self.activation: Activation = activation
        self.gate_up = Linear(width, 2 * hidden, bias=bias)
        self.down = Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        return self.down(gated(self.gate_up(x), self.activation))


class GELUMLP(nn.Module):
    """down(gelu(up(x))), with the exact or the tanh-approximated GELU; the result is `width_out` wide (None: as x)."""

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        width_out: int | None = None,
        bias: bool = True,
        approximate: Literal["none", "tanh"] = "tanh",
    ) -> None:
        super().__init__()
        self.approximate: Literal["none", "tanh"] = approximate
        self.up = WideLinear(width, hidden, bias=bias)
        self.down = WideLinear(hidden, width if width_out is None else width_out, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to [..., width_out]."""
        return self.down(gelu(self.up(x), self.approximate))
