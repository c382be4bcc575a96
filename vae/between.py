"""Frames between two that are known: both are warped to where things are in between, and mixed.

A small network reads the picture decoder's features of both and says, per 4 x 4 pixels of each frame, where to look in
the one and in the other, and how much of which to take; a second one mends what that leaves. The known frames come as
the picture decoder draws them, so that those between are as sharp.

Legend: B clips, T frames between two, D channels of features, H W pixels, h w = H/8 W/8 cells.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .plate_blocks import ChannelNorm, ResidualBlock, conv

STRIDE = 4  # pixels a side that one flow is for
DETAIL = 8  # channels of what the mending is told, at half of the resolution
FLOW_UNIT = 8.0  # pixels
NEARER = 3.0  # logit of the share of the nearer frame
HEADS = 5  # two flows of x and y, and the share


@dataclass(frozen=True, kw_only=True, eq=False)
class Warps:
    """For each frame between, per `STRIDE` x `STRIDE` pixels: where its pixels are in the frame `before` and in the one
    `after`, as offsets x, y in pixels, and the logit of the share that is taken of the one after."""

    before: Tensor  # [B, T, 2, H/4, W/4]
    after: Tensor  # [B, T, 2, H/4, W/4]
    share: Tensor  # [B, T, 1, H/4, W/4]


class Between(nn.Module):
    """See the module's first lines. It begins as a cut from the one to the other."""

    def __init__(self, *, features: int, count: int, blocks: int, width: int, eps: float) -> None:
        super().__init__()
        self.count = count
        self.pair = conv(2 * features, features)
        self.blocks = nn.Sequential(*(ResidualBlock(features, eps) for _ in range(blocks)))
        self.norm = ChannelNorm(features, eps)
        self.warps = nn.Conv2d(features, count * HEADS * 4, 1)
        self.detail = nn.Conv2d(features, count * DETAIL * 16, 1)
        self.mend_in = conv(3 * 12 + DETAIL, width)
        self.mend = ResidualBlock(width, eps)
        self.mend_norm = ChannelNorm(width, eps)
        self.mend_out = conv(width, 12)
        for layer in (self.warps, self.mend_out):
            nn.init.zeros_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def forward(self, features: tuple[Tensor, Tensor], frames: tuple[Tensor, Tensor]) -> Tensor:
        """Frames [B, 3, T, H, W] between two, from features [B, D, h, w] and pixels [B, 3, H, W] of both."""
        drawn, _ = self.drawn(features, frames)
        return drawn

    def drawn(self, features: tuple[Tensor, Tensor], frames: tuple[Tensor, Tensor]) -> tuple[Tensor, Warps]:
        """What `forward` gives, and how it came to be."""
        state = functional.silu(self.norm(self.blocks(self.pair(torch.cat(features, dim=1)))))
        warps, batch = self._warps(state), state.shape[0]
        looks = (warps.before, warps.after)
        first, second = (warped(frame, look) for frame, look in zip(frames, looks, strict=True))  # [B T, 3, H, W]
        share = torch.sigmoid(_enlarged(warps.share.flatten(0, 1)))
        mixed = first + share * (second - first)
        detail = functional.pixel_shuffle(self.detail(state), STRIDE).unflatten(1, (self.count, DETAIL)).flatten(0, 1)
        shown = torch.cat([*(functional.pixel_unshuffle(x, 2) for x in (mixed, first, second)), detail], dim=1)
        h = functional.silu(self.mend_norm(self.mend(self.mend_in(shown))))
        whole = mixed + functional.pixel_shuffle(self.mend_out(h), 2)
        return whole.unflatten(0, (batch, self.count)).transpose(1, 2), warps

    def _warps(self, state: Tensor) -> Warps:
        """The frame begins as the nearer one: a mixture of two that do not quite fit would be blurred."""
        told = functional.pixel_shuffle(self.warps(state), 2).unflatten(1, (self.count, HEADS))
        before, after, share = told.split((2, 2, 1), dim=2)
        numbers = torch.arange(1, self.count + 1, device=told.device)
        nearer = torch.where(2 * numbers <= self.count + 1, -NEARER, NEARER).to(told.dtype)
        return Warps(before=before * FLOW_UNIT, after=after * FLOW_UNIT, share=share + nearer.view(-1, 1, 1, 1))


def warped(frame: Tensor, look: Tensor) -> Tensor:
    """What is seen of a frame [B, 3, H, W] at offsets [B, T, 2, H/4, W/4], in pixels: [B T, 3, H, W]; beyond its edges,
    these."""
    batch, count = look.shape[:2]
    height, width = frame.shape[-2:]
    offsets = _enlarged(look.flatten(0, 1).float())
    rows = torch.arange(height, device=frame.device, dtype=torch.float32)[:, None]
    columns = torch.arange(width, device=frame.device, dtype=torch.float32)
    x = (2 * (columns + offsets[:, 0]) + 1) / width - 1
    y = (2 * (rows + offsets[:, 1]) + 1) / height - 1
    each = frame.float()[:, None].expand(batch, count, *frame.shape[1:]).flatten(0, 1)
    seen = functional.grid_sample(
        each, torch.stack((x, y), dim=-1), mode="bicubic", padding_mode="border", align_corners=False
    )
    return seen.to(frame.dtype)


def _enlarged(x: Tensor) -> Tensor:
    """From [N, C, H/4, W/4] to [N, C, H, W]."""
    return functional.interpolate(x, scale_factor=STRIDE, mode="bilinear", align_corners=False)
