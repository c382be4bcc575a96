"""The convolutions that plate's autoencoders are made of.

Legend: N pictures, C channels, H W pixels or cells.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


class ResidualBlock(nn.Module):
    """x + conv(SiLU(conv(SiLU(norm(x)))))."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.norm = ChannelNorm(width, eps)
        self.conv_1 = conv(width, width)
        self.conv_2 = conv(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] to the same."""
        h = self.conv_1(functional.silu(self.norm(x)))
        return x + self.conv_2(functional.silu(h))


class ChannelNorm(nn.Module):
    """Root-mean-square norm over the channels of each pixel."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] to the same."""
        scale = torch.rsqrt(x.float().square().mean(1, keepdim=True) + self.eps)
        return x * (scale.to(x.dtype) * self.weight.to(x.dtype).view(1, -1, 1, 1))


def conv(width_in: int, width_out: int) -> nn.Conv2d:
    """3 x 3."""
    return nn.Conv2d(width_in, width_out, 3, padding=1)
