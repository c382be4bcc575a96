"""LTX-Video's decoder as a chain of layers through which a clip goes frame by frame.

Where it is not causal, as in all published models, a convolution sees the frame before and the frame after each one; so
pixels depend on some two dozen latent frames to each side. Each layer here takes a frame from the layer before it when
it needs one, and keeps the few that it needs again: all together hold the same, however long the clip is. What comes
out is what diffusers' decoder, whose weights these are, makes of the whole clip.

Legend: B rows, C channels, T frames, H W places.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..core.modulation import ShiftScale, Unmodulated

UNMODULATED = Unmodulated()
Frames = Iterator[Tensor]
"""The frames of a clip in order, a few at a time: [B, C, T, H, W] each."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LTXDecoding:
    """One clip's way through `decoder`, a module of diffusers'. `time` in 0..1, where the decoder is told one. `noise`
    gives what layers add that were trained to have noise of their own, layer after layer: one picture for all frames
    and rows."""

    decoder: Any
    time: float
    noise: torch.Generator

    def __call__(self, latents: Tensor) -> Frames:
        """Frames [B, 3, 1, H, W] of raw latents [B, C, f, h, w] in the decoder's dtype."""
        decoder = self.decoder
        frames = convolved(decoder.conv_in, iter(latents.split(1, dim=2)))
        frames = self._resnets(decoder.mid_block, frames)
        for block in decoder.up_blocks:
            if block.conv_in is not None:
                frames = self._resnet(block.conv_in, frames, None)
            for upsampler in block.upsamplers or ():
                frames = _upsampled(upsampler, frames)
            frames = self._resnets(block, frames)
        frames = convolved(decoder.conv_out, self._final(frames))
        return (_unpatched(each, decoder.patch_size) for each in frames)

    def _resnets(self, block: Any, frames: Frames) -> Frames:
        """All that a block has."""
        for resnet in block.resnets:
            frames = self._resnet(resnet, frames, block.time_embedder)
        return frames

    def _resnet(self, resnet: Any, frames: Frames, embedder: Any) -> Frames:
        """x + conv(norm(conv(norm(x)))); x waits until its sum is there."""
        waiting, table = deque[Tensor](), resnet.scale_shift_table
        first, second = (UNMODULATED, UNMODULATED) if table is None else self._modulations(table, embedder)

        def before_first() -> Frames:
            for x in frames:
                waiting.append(x)
                yield resnet.nonlinearity(first.before(_normed(resnet.norm1, x)))

        def before_second(hidden: Frames) -> Frames:
            for h in self._with_noise(resnet.per_channel_scale1, hidden):
                yield resnet.nonlinearity(second.before(_normed(resnet.norm2, h)))

        inner = convolved(resnet.conv2, before_second(convolved(resnet.conv1, before_first())))
        for h in self._with_noise(resnet.per_channel_scale2, inner):
            x = waiting.popleft()
            x = x if resnet.norm3 is None else _normed(resnet.norm3, x)
            yield h + (x if resnet.conv_shortcut is None else resnet.conv_shortcut(x))

    def _final(self, frames: Frames) -> Frames:
        """Before the last convolution."""
        decoder, table = self.decoder, self.decoder.scale_shift_table
        (last,) = (UNMODULATED,) if table is None else self._modulations(table, decoder.time_embedder)
        for x in frames:
            yield decoder.conv_act(last.before(_normed(decoder.norm_out, x)))

    def _modulations(self, table: Tensor, embedder: Any) -> list[ShiftScale]:
        """Each pair of rows in a table [2 n, C], shift and scale, with what the time adds to them."""
        times = table.new_tensor([self.time]) * self.decoder.timestep_scale_multiplier
        told = embedder(timestep=times, resolution=None, aspect_ratio=None, batch_size=1, hidden_dtype=table.dtype)
        rows = (told.unflatten(1, (len(table), -1)) + table)[..., None, None, None].unbind(1)  # [1, C, 1, 1, 1] each
        return [ShiftScale(shift=shift, scale=scale) for shift, scale in zip(rows[::2], rows[1::2], strict=True)]

    def _with_noise(self, strengths: Tensor | None, frames: Frames) -> Frames:
        """Noise [H, W] times the channels' `strengths` [C, 1, 1] added to each frame, where a layer has them."""
        return frames if strengths is None else self._noised(strengths, frames)

    def _noised(self, strengths: Tensor, frames: Frames) -> Frames:
        added: Tensor | None = None
        for h in frames:
            if added is None:
                drawn = torch.randn(h.shape[-2:], generator=self.noise, dtype=torch.float32)
                added = (drawn.to(h) * strengths)[None, :, None]
            yield h + added


def convolved(conv: Any, frames: Frames) -> Frames:
    """A convolution in time and space, for each of the `frames` as many; at the ends the first and the last one stand
    for those that there are not."""
    size = conv.kernel_size[0]
    before, after = (size - 1, 0) if conv.is_causal else (size // 2, size // 2)
    assert after <= 1
    here = next(frames, None)
    seen = None if here is None else here[:, :, :1].repeat(1, 1, before, 1, 1)
    while here is not None and seen is not None:
        following = next(frames, None) if after else None
        end = here[:, :, -1:] if following is None else following[:, :, :1]
        yield conv.conv(torch.cat((seen, here, *(end for _ in range(after))), dim=2))
        shown = here if here.shape[2] >= before else torch.cat((seen, here), dim=2)
        seen = shown[:, :, shown.shape[2] - before :]
        here = following if after else next(frames, None)


def _upsampled(upsampler: Any, frames: Frames) -> Frames:
    """Every frame as `stride` times as many, larger ones, one by one; the very first alone begins with its last."""
    waiting, stride = deque[Tensor](), tuple(upsampler.stride)
    repeats = prod(stride) // upsampler.upscale_factor

    def kept() -> Frames:
        for x in frames:
            waiting.append(x)
            yield x

    skipped = stride[0] - 1
    for h in convolved(upsampler.conv, kept()):
        x, h = waiting.popleft(), _spread(h, stride)
        if upsampler.residual:
            h = h + _spread(x, stride).repeat(1, repeats, 1, 1, 1)
        yield from h[:, :, skipped:].split(1, dim=2)
        skipped = 0


def _normed(norm: nn.Module, x: Tensor) -> Tensor:
    """A norm over channels."""
    return norm(x.movedim(1, -1)).movedim(-1, 1)


def _spread(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Channels [C t h w] as places: [B, C, T t, H h, W w]."""
    x = x.unflatten(1, (-1, *stride)).permute(0, 1, 5, 2, 6, 3, 7, 4)
    return x.flatten(6, 7).flatten(4, 5).flatten(2, 3)


def _unpatched(x: Tensor, patch: int) -> Tensor:
    """[B, 3 p^2, T, H, W] to [B, 3, T, H p, W p], patches read column by column."""
    return x.unflatten(1, (-1, patch, patch)).permute(0, 1, 4, 5, 3, 6, 2).flatten(5).flatten(3, 4)
