"""The causal convolution of Wan's kind of autoencoder, in place of diffusers'.

Legend: B rows, I and O channels, T frames, H W places.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional


class CausalConv(nn.Module):
    """A convolution whose frames see none after them, with all its weights [O, I, t, kh, kw].

    diffusers' makes a padded copy of what comes in; here the border is left to the operation, and a first frame alone,
    before which there is nothing but zeros, meets only the weights that see it.
    """

    def __init__(self, causal: nn.Conv3d) -> None:
        """Of diffusers' own, with whose weights it works; `_padding` is how far that reaches on each side."""
        super().__init__()
        self.weight, self.bias, self.stride = causal.weight, causal.bias, causal.stride
        left, _, top, _, self.reach, _ = cast("tuple[int, ...]", cast(Any, causal)._padding)
        self.border = (top, left)

    def forward(self, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
        """[B, I, T, H, W], before it the frames in `cache_x`, to [B, O, T, H, W] (fewer with a stride)."""
        if self.reach and cache_x is None and x.shape[2] == 1:
            return functional.conv2d(x[:, :, 0], self.weight[:, :, -1], self.bias, padding=self.border)[:, :, None]
        cached = 0
        if self.reach and cache_x is not None:
            x, cached = torch.cat([cache_x, x], dim=2), cache_x.shape[2]
        if cached < self.reach:
            x = functional.pad(x, (0, 0, 0, 0, self.reach - cached, 0))
        return functional.conv3d(x, self.weight, self.bias, self.stride, (0, *self.border))


def with_causal_convs(module: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """The module, in which each convolution of `kind`, diffusers' class, is one of ours with its weights."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, kind):
                setattr(parent, name, CausalConv(cast(nn.Conv3d, child)))
    return module
