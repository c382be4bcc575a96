"""Feed-forward layers."""

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020); gate and up are one matrix, gate first."""

    def __init__(self, width: int, hidden: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class GELUMLP(nn.Module):
    """down(gelu(up(x))), with the exact or the tanh-approximated GELU."""

    def __init__(
        self, width: int, hidden: int, *, bias: bool = True, approximate: Literal["none", "tanh"] = "tanh"
    ) -> None:
        super().__init__()
        self.approximate = approximate
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        return self.down(functional.gelu(self.up(x), approximate=self.approximate))
