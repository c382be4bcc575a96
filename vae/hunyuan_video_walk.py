"""Both halves of HunyuanVideo 1.5's autoencoder, run on a clip a few frames at a time.

diffusers' modules hold the weights, and say what the layers are; their own `forward` takes whole clips. Here a call
keeps what later frames read of earlier ones: the last frames that went into each convolution, and all that attention
has seen, one state for each latent cell. The numbers are those of a whole clip: everything is causal in time.

Legend: B rows, C channels, T frames, H W places, L = T H W tokens, S tokens of all frames so far.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

REACH = 2  # frames before its own that a convolution sees


@dataclass(frozen=True, kw_only=True, eq=False)
class Passage:
    """One clip on its way through one half: first its first frame alone, then the frames of a latent frame at a time.
    `kept` is what layers keep of what they saw."""

    kept: dict[nn.Module, Tensor] = field(default_factory=dict[nn.Module, Tensor])

    def encoded(self, encoder: Any, x: Tensor) -> Tensor:
        """Moments [B, 2 C, 1, h, w] of the next pixels [B, 3, T, H, W]."""
        h = self._convolved(encoder.conv_in, x)
        for block in encoder.down_blocks:
            for resnet in block.resnets:
                h = self._resnet(resnet, h)
            for layer in block.downsamplers or ():
                h = self._halved(layer, h)
        h = self._middle(encoder.mid_block, h)
        shortcut = h.unflatten(1, (-1, encoder.group_size)).mean(dim=2)
        return self._convolved(encoder.conv_out, _activated(encoder.norm_out, h)).add_(shortcut)

    def decoded(self, decoder: Any, x: Tensor) -> Tensor:
        """The next pixels [B, 3, T, H, W] of one latent frame [B, C, 1, h, w]."""
        h = self._convolved(decoder.conv_in, x).add_(x.repeat_interleave(decoder.repeat, dim=1))
        h = self._middle(decoder.mid_block, h)
        for block in decoder.up_blocks:
            for resnet in block.resnets:
                h = self._resnet(resnet, h)
            for layer in block.upsamplers or ():
                h = self._doubled(layer, h)
        return self._convolved(decoder.conv_out, _activated(decoder.norm_out, h))

    def _middle(self, block: Any, x: Tensor) -> Tensor:
        first, *others = block.resnets
        h = self._resnet(first, x)
        for attention, resnet in zip(block.attentions, others, strict=True):
            h = self._resnet(resnet, h if attention is None else self._attended(attention, h))
        return h

    def _resnet(self, block: Any, x: Tensor) -> Tensor:
        h = self._convolved(block.conv1, _activated(block.norm1, x))
        h = self._convolved(block.conv2, _activated(block.norm2, h))
        return h.add_(x if block.conv_shortcut is None else block.conv_shortcut(x))

    def _convolved(self, layer: Any, x: Tensor) -> Tensor:
        """[B, C, T, H, W] to [B, C', T, H, W]. Beyond each border, and before the first frame, is what lies at it."""
        before = self.kept.get(layer)
        x = torch.cat((x[:, :, :1].expand(-1, -1, REACH, -1, -1) if before is None else before, x), dim=2)
        self.kept[layer] = x[:, :, -REACH:].clone()  # not a view, which would hold all frames
        return layer.conv(functional.pad(x, (1, 1, 1, 1, 0, 0), mode="replicate"))

    def _attended(self, block: Any, x: Tensor) -> Tensor:
        """One latent frame [B, C, 1, H, W], each cell of which sees all cells so far.

        q k = q (W h + b) = (q W) h + q b, and the last is the same for all keys; the values' weights add up to 1. So
        the normalised states h serve as keys and as values: one tensor to keep instead of two.
        """
        h = _normed(block.norm, x).flatten(2).transpose(1, 2)  # [B, L, C]
        seen = self.kept.get(block)
        seen = h if seen is None else torch.cat((seen, h), dim=1)  # [B, S, C]
        self.kept[block] = seen
        queries = _projected(block.to_q, h) @ block.to_k.weight.flatten(1)
        mean = functional.scaled_dot_product_attention(queries[:, None], seen[:, None], seen[:, None])[:, 0]
        attended = _projected(block.proj_out, _projected(block.to_v, mean))
        return x + attended.transpose(1, 2).unflatten(2, x.shape[2:])

    def _halved(self, layer: Any, x: Tensor) -> Tensor:
        """Half as many rows and columns and, in time, frames; the first one stands alone, its channels twice."""
        alone = layer.conv not in self.kept
        in_time = 2 if layer.add_temporal_downsample and not alone else 1
        h = layer._dcae_downsample_rearrange(self._convolved(layer.conv, x), r1=in_time)
        h = torch.cat((h, h), dim=1) if layer.add_temporal_downsample and alone else h
        shortcut = layer._dcae_downsample_rearrange(x, r1=in_time)
        return h.add_(shortcut.unflatten(1, (h.shape[1], -1)).mean(dim=2))

    def _doubled(self, layer: Any, x: Tensor) -> Tensor:
        """The inverse: of the first frame's channels, the first half is taken."""
        alone = layer.conv not in self.kept
        h = self._convolved(layer.conv, x)
        if not layer.add_temporal_upsample:
            return _spread(layer, h, 1).add_(_spread(layer, x.repeat_interleave(layer.repeats, dim=1), 1))
        h, shortcut = (_spread(layer, each, 1 if alone else 2) for each in (h, x))
        h = h[:, : h.shape[1] // 2] if alone else h
        return h.add_(shortcut.repeat_interleave(layer.repeats // 2 if alone else layer.repeats, dim=1))


def _spread(layer: Any, x: Tensor, in_time: int) -> Tensor:
    """Channels as further rows, columns and, with 2, frames."""
    return layer._dcae_upsample_rearrange(x, r1=in_time)


def _projected(layer: Any, h: Tensor) -> Tensor:
    """A convolution that sees one place only, of tokens [B, L, C]."""
    return functional.linear(h, layer.weight.flatten(1), layer.bias)


def _activated(norm: Any, x: Tensor) -> Tensor:
    return functional.silu(_normed(norm, x), inplace=True)


def _normed(norm: Any, x: Tensor) -> Tensor:
    """Each place's channels at length sqrt(C), times weights; in memory of its own."""
    return functional.normalize(x.float(), dim=1).to(x.dtype).mul_(norm.gamma * norm.scale)
